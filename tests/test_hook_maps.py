"""Hook maps that do not fit, pipelines that cannot be patched: the error names the thing, nothing is changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.modular_pipelines import FluxAutoBlocks
from probes import Keep, Watch
from snapshot import changes, snapshot
from tiny import build, run

from chitu_hooks import HookMap, HookMapError, PatchError, Stack, load_hook_map, patch

STREAMS = {"image": "hidden_states", "text": "encoder_hidden_states"}
RETURNS = ("text", "image")


def flux_map(**changed: Any) -> HookMap:
    stacks = tuple(Stack(path, STREAMS, RETURNS) for path in ("transformer_blocks", "single_transformer_blocks"))
    return HookMap(**{"name": "flux", "pipelines": ("FluxPipeline",), "stacks": stacks, **changed})


BAD: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "wrong path": (
        lambda: flux_map(stacks=(Stack("transformer_block", STREAMS, RETURNS),)),
        ("'flux'", "transformer", "'transformer_block'", "nearest:", "transformer_blocks", "single_transformer_blocks"),
    ),
    "wrong path below a right one": (
        lambda: flux_map(stacks=(Stack("transformer_blocks.0.blocks", STREAMS, RETURNS),)),
        ("'transformer_blocks.0.blocks'", "transformer_blocks"),
    ),
    "path of no ModuleList": (
        lambda: flux_map(stacks=(Stack("x_embedder", STREAMS, RETURNS),)),
        ("transformer.x_embedder", "Linear", "ModuleList"),
    ),
    "wrong argument": (
        lambda: flux_map(stacks=(Stack("transformer_blocks", {"image": "hidden_state"}, ("image",)),)),
        ("transformer.transformer_blocks.0", "FluxTransformerBlock", "'hidden_state'", "nearest: ", "hidden_states"),
    ),
    "wrong denoiser": (
        lambda: flux_map(denoisers=("transformers",)),
        ("FluxPipeline", "'transformers'", "nearest: transformer"),
    ),
    "wrong conditioning": (
        lambda: flux_map(conditioning=("encoder_hidden_state",)),
        ("transformer.forward", "'encoder_hidden_state'", "nearest: ", "encoder_hidden_states"),
    ),
    "wrong aligned argument": (
        lambda: flux_map(stacks=(Stack("transformer_blocks", STREAMS, RETURNS, aligned={"image_rotary.0": "joint"}),)),
        ("transformer.transformer_blocks.0", "'image_rotary'", "nearest: ", "image_rotary_emb"),
    ),
    "wrong exit": (
        lambda: flux_map(exit="norm_outs"),
        ("'flux'", "'norm_outs'", "nearest: ", "norm_out"),
    ),
    "wrong exit role": (
        lambda: flux_map(exit="norm_out", exit_role="picture"),
        ("'flux'", "exit_role", "'picture'", "known: image, joint"),
    ),
    "wrong trunk argument": (
        lambda: flux_map(trunk_arguments=("controlnet_blocks",)),
        ("transformer.forward", "'controlnet_blocks'", "nearest: ", "controlnet_block_samples"),
    ),
    "a map of another model under this one's name": (
        lambda: flux_map(stacks=(Stack("blocks", {"image": "hidden_states"}, ("image",)),)),
        ("FluxTransformer2DModel", "no stack 'blocks'", "transformer_blocks"),
    ),
    "another model's map": (
        lambda: flux_map(name="wan", pipelines=("WanPipeline",)),
        ("'wan'", "WanPipeline", "not for FluxPipeline"),
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_map_that_does_not_fit(case: str) -> None:
    make, words = BAD[case]
    pipe = build("flux")
    before = snapshot(pipe)
    with pytest.raises(HookMapError) as caught:
        patch(pipe, [Watch(), Keep()], hook_map=make())
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value), "one sentence"
    assert not changes(before, snapshot(pipe))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((STREAMS, ("txt",)), ("'blocks'", "'txt'", "text")),
        (({"imag": "hidden_states"}, ("imag",)), ("'blocks'", "'imag'", "nearest: image")),
    ],
)
def test_a_stack_with_a_wrong_role(arguments: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(HookMapError) as caught:
        Stack("blocks", *arguments)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pipelines": "FluxPipeline"}, ("'flux'", "pipelines is the word 'FluxPipeline'", "('FluxPipeline',)")),
        ({"denoisers": "transformer"}, ("denoisers is the word", "('transformer',)")),
        ({"guidance": "sequentiel"}, ("'sequentiel'", "nearest: sequential")),
        ({"stacks": (Stack("blocks", {}, ()), Stack("blocks", {}, ()))}, ("'blocks' 2 times",)),
    ],
)
def test_a_map_that_cannot_be_meant_so(change: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(HookMapError) as caught:
        flux_map(**change)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"returns": "image"}, ("stack 'blocks'", "returns is the word 'image'", "('image',)")),
        ({"aligned": {"rope": "pixels"}}, ("aligned['rope'] is 'pixels'", "image, text or joint")),
    ],
)
def test_a_stack_that_cannot_be_meant_so(change: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(HookMapError) as caught:
        Stack(**{"path": "blocks", "streams": STREAMS, "returns": RETURNS, **change})
    for word in words:
        assert word in str(caught.value)


def test_two_maps_for_one_pipeline() -> None:
    pipe = build("flux")
    before = snapshot(pipe)
    with pytest.raises(HookMapError, match=r"'flux' and 'other'.*FluxPipeline.*hook_map="):
        patch(pipe, [Watch()], registry=[flux_map(), flux_map(name="other")])
    assert not changes(before, snapshot(pipe))


def test_explicit_wins_over_registry_and_registry_over_inference() -> None:
    mine, registered = flux_map(name="mine"), flux_map(name="registered")
    for hook_map, registry, source, name in (
        (mine, [registered, flux_map(name="other")], "explicit", "mine"),
        (None, [registered, flux_map(name="wan", pipelines=("WanPipeline",))], "registry", "registered"),
        (None, [], "inferred", "FluxTransformer2DModel"),
    ):
        with patch(build("flux"), [Watch()], hook_map=hook_map, registry=registry) as handle:
            assert (handle.hook_map.source, handle.hook_map.name) == (source, name)
            assert f"{name!r} ({source})" in str(handle.report())


@pytest.mark.parametrize("hook_map", [flux_map(), None], ids=["map", "inferred"])
def test_with_and_without_a_map_the_result_is_the_same(hook_map: HookMap | None) -> None:
    cache = Keep(0, 2)
    with patch(build("flux"), [cache], hook_map=hook_map) as handle:
        result = run("flux", handle.pipe, 4)
    assert sum(cache.skips) == 4
    with patch(build("flux"), [Keep(0, 2)]) as handle:
        assert torch.equal(run("flux", handle.pipe, 4), result)


FILES = {
    "without HOOK_MAP": ("MAP = 1\n", "no HOOK_MAP"),
    "with something else": ("HOOK_MAP = {'name': 'flux'}\n", "no HOOK_MAP of type chitu_hooks.HookMap"),
    "that raises": ("1 / 0\n", "does not run: ZeroDivisionError"),
    "with a syntax error": ("def\n", "does not run: SyntaxError"),
    "with a field that there is not": (
        "from chitu_hooks import HookMap\nHOOK_MAP = HookMap(name='flux', pipelines=('FluxPipeline',), condition=('a',))\n",
        "unexpected keyword argument 'condition'; nearest: conditioning",
    ),
    "that exits": ("raise SystemExit(3)\n", "does not run: SystemExit"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_bad_file(case: str, tmp_path: Path) -> None:
    text, words = FILES[case]
    path = tmp_path / "flux.py"
    path.write_text(text)
    pipe = build("flux")
    before = snapshot(pipe)
    with pytest.raises(HookMapError) as caught:
        patch(pipe, [Watch()], hook_map=path)
    assert words in str(caught.value)
    assert "flux.py" in str(caught.value)
    assert not changes(before, snapshot(pipe))


def test_a_missing_file(tmp_path: Path) -> None:
    (tmp_path / "flux.py").write_text("")
    with pytest.raises(HookMapError, match=r"no hook map file .*fluks\.py.*nearest: flux\.py"):
        patch(build("flux"), hook_map=tmp_path / "fluks.py")
    with pytest.raises(HookMapError, match="no hook map file"):
        load_hook_map(str(tmp_path / "nowhere" / "flux.py"))


def test_a_good_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from chitu_hooks import HookMap, Stack\n"
        "S = {'image': 'hidden_states', 'text': 'encoder_hidden_states'}\n"
        "HOOK_MAP = HookMap('mine', ('FluxPipeline',), stacks=(Stack('transformer_blocks', S, ('text', 'image')),))\n"
    )
    with patch(build("flux"), [Watch()], hook_map=str(path)) as handle:
        assert (handle.hook_map.name, handle.hook_map.source) == ("mine", "explicit")
        assert [stack.path for stack in handle.sites.stacks] == ["transformer_blocks"]


def test_a_map_covers_subclasses() -> None:
    class Mine(type(build("flux"))):  # type: ignore[misc]
        pass

    with patch(build("flux", cls=Mine), [Watch()], registry=[flux_map()]) as handle:
        assert handle.hook_map.source == "registry"


def test_a_pipeline_without_a_denoiser() -> None:
    pipe = build("flux")
    pipe.transformer = None
    with pytest.raises(HookMapError, match=r"FluxPipeline.*vae \(AutoencoderKL\)"):
        patch(pipe, [Watch()])
    with pytest.raises(HookMapError, match=r"every denoiser of FluxPipeline \(transformer\) is None"):
        patch(pipe, [Watch()], hook_map=flux_map())
    assert not any("chitu" in key for key in vars(pipe))


def test_a_modular_pipeline_without_a_map_of_its_own() -> None:
    pipe = FluxAutoBlocks().init_pipeline()
    pipe.update_components(transformer=build("flux").transformer)
    with pytest.raises(
        HookMapError, match=r"FluxModularPipeline is a modular pipeline.*pipelines=\('FluxModularPipeline',\)"
    ):
        patch(pipe, [Watch()])
    assert not any("chitu" in key for key in vars(pipe))
    patch(pipe, [Watch()], hook_map=flux_map(pipelines=("FluxModularPipeline",))).undo()


def test_patching_twice() -> None:
    pipe = build("flux")
    first = patch(pipe, [Watch()])
    before = snapshot(pipe)
    with pytest.raises(PatchError, match="FluxPipeline: watch"):
        patch(pipe, [Keep()])
    assert not changes(before, snapshot(pipe))
    first.undo()
    patch(pipe, [Keep()]).undo()


@pytest.mark.parametrize("thing", ["transformer", "class", "none", "text"])
def test_what_is_no_pipeline(thing: str) -> None:
    pipe = build("flux")
    wrong = {"transformer": pipe.transformer, "class": type(pipe), "none": None, "text": "FLUX.1-dev"}[thing]
    with pytest.raises(PatchError, match="from_pretrained") as caught:
        patch(wrong, [Watch()])
    assert type(wrong).__name__ in str(caught.value)


def test_the_same_feature_twice() -> None:
    pipe = build("flux")
    before = snapshot(pipe)
    with pytest.raises(PatchError, match="'watch' is given 2 times"):
        patch(pipe, [Watch(), Keep(), Watch()])
    assert not changes(before, snapshot(pipe))


@pytest.mark.parametrize("returns", [("image",), ("text", "image", "joint")])
def test_blocks_that_return_something_else_than_the_map_says(returns: tuple[str, ...]) -> None:
    pipe = build("flux")
    stock = run("flux", pipe, 2)
    stack = Stack("transformer_blocks", {**STREAMS, "joint": "temb"}, returns)
    with patch(pipe, [Keep(0)], hook_map=flux_map(stacks=(stack,))):
        with pytest.raises(HookMapError, match=r"transformer\.transformer_blocks.* 2 values.*returns="):
            run("flux", pipe, 2)
    assert torch.equal(run("flux", pipe, 2), stock)
