"""Contract 5: branches are told apart from evidence, never by counting calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from matrix.table import Bare
from probes import Keep, Watch, difference
from tiny import TINY, build, run

from chitu_hooks import HookMap, branches, patch

STEPS = 8
SEQUENTIAL = tuple(name for name, tiny in TINY.items() if tiny.branches == 2)
NOTE = "new conditioning tensors at every step"


@pytest.mark.parametrize("name", SEQUENTIAL)
def test_every_branch_has_its_own_state(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = run(name, build(name), STEPS)
    cache = Keep()
    with patch(build(name), [cache]) as handle:
        own = run(name, handle.pipe, STEPS)
        calls = handle.report().branches
    by_branch: dict[str, list[bool]] = {}
    for branch, _, _, skipped in cache.log:
        by_branch.setdefault(branch, []).append(skipped)
    assert len(by_branch) == len(calls) == 2
    for skips in by_branch.values():
        assert skips == [False] + [True] * (STEPS - 1), "the first call of each branch is computed, all others hit"
    assert all(count["computed"] == 1 and count["skipped"] == STEPS - 1 for count in calls.values())

    identify = branches.identify

    def shared(generation: Any, call: Any, conditioning: Any) -> Any:
        found = identify(generation, call, conditioning)
        first = generation.branches[0]
        call.signature = None
        return first if found.denoiser is first.denoiser else found

    monkeypatch.setattr(branches, "identify", shared)
    monkeypatch.setattr(branches, "signature", lambda call: call.denoiser.name)
    mixed_cache = Keep()
    with patch(build(name), [mixed_cache]) as handle:
        try:
            mixed = run(name, handle.pipe, STEPS)
        except RuntimeError:  # branches of different lengths do not even fit into each other's state
            return
    assert sum(mixed_cache.skips) > sum(cache.skips)
    assert difference(own, stock) < difference(mixed, stock)


@pytest.mark.parametrize("name", TINY)
def test_guidance_on_off_on_with_one_handle(name: str) -> None:
    fresh = {}
    for guided in (True, False):
        with patch(build(name), [Keep(0, 3)]) as handle:
            fresh[guided] = run(name, handle.pipe, STEPS, guided=guided)
    cache = Keep(0, 3)
    with patch(build(name), [cache]) as handle:
        for guided in (True, False, True, False, False, True):
            cache.log.clear()
            assert torch.equal(run(name, handle.pipe, STEPS, guided=guided), fresh[guided])
            number = TINY[name].branches if guided else 1
            assert len(cache.log) == number * STEPS
            assert sum(cache.skips) == number * (STEPS - 2)


def test_guidance_switched_off_within_a_call() -> None:
    """Skip-layer guidance asks for a third pass in part of the steps, and that pass leaves out a block."""
    stock_pipe = build("sd3")
    over = {"skip_guidance_layers": [1], "skip_layer_guidance_start": 0.2, "skip_layer_guidance_stop": 0.8}
    stock = run("sd3", stock_pipe, STEPS, **over)
    assert not torch.equal(stock, run("sd3", stock_pipe, STEPS))
    for full in (True, False):
        cache = Keep(*range(STEPS)) if full else Keep(0)
        with patch(build("sd3"), [cache]) as handle:
            result = run("sd3", handle.pipe, STEPS, **over)
            again = run("sd3", handle.pipe, STEPS, **over)
            calls = handle.report().branches
        assert torch.equal(result, again)
        assert torch.equal(result, stock) == full
        assert len(calls) == 2
        passes = sorted(sum(count.values()) for count in calls.values())
        assert passes[0] < passes[1] == STEPS
        if not full:
            assert all(count["computed"] == 1 for count in calls.values()), "the pass with fewer blocks skips as well"
            assert all(count["skipped"] for count in calls.values())
            assert difference(result, stock) < 0.5


@pytest.mark.parametrize("layers", [[0], [1], [2], [0, 2]])
def test_skip_layer_guidance_that_leaves_out_the_first_or_last_block(layers: list[int]) -> None:
    over = {"skip_guidance_layers": layers, "skip_layer_guidance_start": 0.0, "skip_layer_guidance_stop": 1.0}
    stock = run("sd3", build("sd3"), STEPS, **over)
    cache = Keep(0, 1, 2)  # the third pass begins at 1: computed twice, so that the last block is known in the second
    with patch(build("sd3"), [cache, Watch()]) as handle:
        result = run("sd3", handle.pipe, STEPS, **over)
        skipped = [count["skipped"] for count in handle.report().branches.values()]
    with patch(build("sd3"), [Keep(*range(STEPS))]) as handle:
        assert torch.equal(run("sd3", handle.pipe, STEPS, **over), stock)
    assert len(skipped) == 2 and all(skipped)
    assert torch.isfinite(result).all()
    assert not torch.equal(result, stock)


@pytest.mark.parametrize("name", SEQUENTIAL)
def test_conditioning_made_anew_at_every_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, pipe = Keep(0, 3), build(name)
    with patch(pipe, [cache]) as handle:
        expected = run(name, pipe, STEPS)
        assert not any(NOTE in note for note in handle.report().notes)

    cache = Keep(0, 3)
    original = branches.identify

    def with_clones(generation: Any, call: Any, conditioning: Any) -> Any:
        for key in conditioning:
            if isinstance(call.kwargs.get(key), torch.Tensor):
                call.kwargs[key] = call.kwargs[key].clone()
        return original(generation, call, conditioning)

    monkeypatch.setattr(branches, "identify", with_clones)
    with patch(build(name), [cache]) as handle:
        result = run(name, handle.pipe, STEPS)
        report = handle.report()
    assert torch.equal(result, expected)
    assert sum(cache.skips) == 2 * (STEPS - 2)
    assert len(report.branches) == 2
    assert any(NOTE in note for note in report.notes)


def test_a_pipeline_that_casts_its_conditioning_in_the_loop() -> None:
    """Sana does, when the transformer's dtype is not that of the text: a cast a step, none of it the same tensor."""
    pipe = build("sana")
    pipe.transformer.to(torch.bfloat16)
    cache = Keep(0, 3)
    stock = run("sana", pipe, STEPS)
    with patch(pipe, [Keep(*range(STEPS))]):
        assert torch.equal(run("sana", pipe, STEPS), stock)
    with patch(pipe, [cache]) as handle:
        result = run("sana", pipe, STEPS)
        report = handle.report()
    assert sum(cache.skips) == STEPS - 2
    assert len(report.branches) == 1
    assert any(NOTE in note for note in report.notes)
    assert not torch.equal(result, stock)


@pytest.mark.parametrize("name", ["flux", "wan"])
def test_a_callback_that_replaces_the_prompt(name: str) -> None:
    """The new prompt is computed, not answered with the old prompt's residual."""
    swapped = TINY[name].embed(torch.Generator().manual_seed(99), 1, 6)["prompt_embeds"]

    def callback(pipe: Any, step: int, timestep: Any, kwargs: Any) -> dict[str, Any]:
        return {"prompt_embeds": swapped} if step == 3 else {}

    over = {"callback_on_step_end": callback, "callback_on_step_end_tensor_inputs": ["latents", "prompt_embeds"]}
    cache = Keep(0)
    with patch(build(name), [cache]) as handle:
        run(name, handle.pipe, STEPS, **over)
    computed = [(branch, position) for branch, position, _, skipped in cache.log if not skipped]
    assert [position for _, position in computed] == [0, 0, 4], "both branches first, and the new prompt when it comes"


def test_passes_that_differ_in_a_plain_argument_only() -> None:
    """Some pipelines run a further pass on the same conditioning, and say what is different with a flag or a list."""
    pipe, seen, watch = build("sd3"), [], Watch()
    recorder = pipe.transformer.register_forward_pre_hook(lambda _, a, k: seen.append((a, k)), with_kwargs=True)
    run("sd3", pipe, 1)
    recorder.remove()
    args, kwargs = seen[0]
    with patch(pipe, [watch]) as handle, handle._engine.generate(pipe):
        for _ in range(2):
            pipe.transformer(*args, **kwargs)
            pipe.transformer(*args, **{**kwargs, "skip_layers": [1]})
    assert watch.branches[0] == watch.branches[2] != watch.branches[1] == watch.branches[3]


def test_a_prompt_that_changes_at_every_step_piles_nothing_up() -> None:
    generator = torch.Generator().manual_seed(5)

    def callback(pipe: Any, step: int, timestep: Any, kwargs: Any) -> dict[str, Any]:
        return {"prompt_embeds": TINY["flux"].embed(generator, 1, 6)["prompt_embeds"]}

    over = {"callback_on_step_end": callback, "callback_on_step_end_tensor_inputs": ["latents", "prompt_embeds"]}
    held = {}
    for steps in (4, 8):
        cache = Keep(0)
        with patch(build("flux"), [cache]) as handle:
            run("flux", handle.pipe, steps, guided=False, **over)
        assert not any(cache.skips), "there is nothing to reuse"
        report = handle.report()
        assert any("keeps changing" in note for note in report.notes)
        held[steps] = report.bytes_held
    assert held[8] == held[4] > 0


@pytest.mark.parametrize("conditioning", [("class_labels",), ()], ids=["labels", "nothing known"])
def test_branches_of_a_driven_model(conditioning: tuple[str, ...]) -> None:
    """DiT is conditioned on class labels. Where a map names nothing, the place in the step is all there is."""
    pipe, cache = Bare("DiTTransformer2DModel").build(), Keep(0, 2)
    hook_map = HookMap("dit", ("Driven",), conditioning=conditioning)
    with patch(pipe, [cache], hook_map=hook_map) as handle:
        pipe(4)
    assert {branch for branch, *_ in cache.log} == {"branch 0", "branch 1"}
    assert cache.skips == [False, False, True, True] * 2
    assert len(handle.report().branches) == 2
