"""The static cache: what it computes, what it reports in FLOPs (contract 11), and what it refuses."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from diffusers import FirstBlockCacheConfig, FluxTransformer2DModel
from diffusers.hooks import apply_first_block_cache
from tiny import TINY, build, run
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from chitu_diffusion import Static, patch
from chitu_diffusion.flexcache import count_flops, make_params
from chitu_hooks import ChituWarning, PatchError, RefusedError

pytestmark = pytest.mark.filterwarnings("ignore:static.*steps are few:chitu_hooks.ChituWarning")
STEPS = 6
NOT_ON_META = {"lumina2": "reads its mask's lengths on the host"}


@pytest.mark.parametrize("name", TINY)
def test_half_the_steps_hit_and_all_of_them_change_nothing(name: str) -> None:
    pipe = build(name)
    stock = run(name, pipe, STEPS)
    with patch(pipe, cache=Static(steps=range(STEPS))):
        assert torch.equal(run(name, pipe, STEPS), stock)
    with patch(pipe, cache=Static(steps=(0, 1, 3))) as handle:
        cached = run(name, pipe, STEPS)
    (feature,) = handle.report().features
    assert (feature["computed"], feature["hits"], feature["due"]) == (3 * TINY[name].branches,) * 3
    assert not torch.equal(cached, stock)
    if name in NOT_ON_META:
        assert "does not run on the meta device" in feature["flops"]["not counted"], NOT_ON_META[name]
    else:
        flops = feature["flops"]
        assert flops["spent"] + flops["saved"] == flops["full"]
        assert 0.3 * flops["full"] < flops["saved"] < 0.5 * flops["full"]


def test_flops_are_what_torch_counts_in_a_real_call() -> None:
    pipe = build("flux")
    seen: list[tuple[Any, Any]] = []
    pipe.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((args, kwargs)), with_kwargs=True
    )
    run("flux", pipe, 1)
    args, kwargs = seen[0]
    counter = FlopCounterMode(display=False)
    # The counter knows no formula for torch's flash attention on the CPU: another reason to count on the meta device.
    with counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        pipe.transformer(*args, **kwargs)
    counted = count_flops(pipe.transformer, args, kwargs, ("transformer_blocks", "single_transformer_blocks"))
    assert counted.total == counter.get_total_flops() > 0
    assert 0.9 * counted.total < counted.trunk < counted.total


def test_flops_of_flux_dev() -> None:
    """59.5 TFLOP in matrix products and 14.9 in attention at 1024², counted by hand from the published configuration."""
    with torch.device("meta"):
        transformer = FluxTransformer2DModel(guidance_embeds=True)
        call = {
            "hidden_states": torch.empty(1, 4096, 64),
            "encoder_hidden_states": torch.empty(1, 512, 4096),
            "pooled_projections": torch.empty(1, 768),
            "timestep": torch.empty(1),
            "guidance": torch.empty(1),
            "img_ids": torch.empty(4096, 3),
            "txt_ids": torch.empty(512, 3),
        }
    assert count_flops(transformer, (), call).total / 1e12 == pytest.approx(74.38, abs=0.01)


def test_a_step_that_never_comes_is_told() -> None:
    with patch(build("flux"), cache=Static(steps=(0, 2, 40))) as handle:
        run("flux", handle.pipe, 4)
    assert any("[40] never came" in note for note in handle.report().notes)


def test_due_skips_that_never_happen_warn() -> None:
    """Another width at every step: no residual ever fits, and nobody would notice."""
    pipe = build("flux")
    with patch(pipe, cache=Static(steps=(0,))) as handle:
        engine = handle._engine
        original = type(engine.blocks).leave

        def forgetful(self: Any, call: Any) -> None:
            original(self, call)
            call.branch.signature = object()

        engine.blocks.leave = forgetful.__get__(engine.blocks)
        with pytest.warns(ChituWarning, match=r"static: \d+ skips were due and none happened"):
            run("flux", pipe, 3)


def test_full_budget_does_not_warn() -> None:
    with patch(build("flux"), cache=Static(steps=range(3))) as handle, warnings.catch_warnings():
        warnings.simplefilter("error", ChituWarning)
        run("flux", handle.pipe, 3)


def test_a_cache_of_diffusers_in_its_place_is_refused() -> None:
    pipe = build("flux")
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    with pytest.raises(
        RefusedError, match=r"transformer has diffusers' own cache enabled; call transformer\.disable_cache"
    ):
        patch(pipe, cache=Static(steps=(0,)))
    pipe.transformer.disable_cache()
    patch(pipe, cache=Static(steps=(0,))).undo()


def test_a_cache_of_diffusers_applied_by_function_is_refused() -> None:
    pipe = build("flux")
    apply_first_block_cache(pipe.transformer, FirstBlockCacheConfig(threshold=0.1))
    with pytest.raises(
        RefusedError, match=r"transformer_blocks\.0 carries 'fbc_leader_block_hook', a cache of diffusers"
    ):
        patch(pipe, cache=Static(steps=(0,)))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("statik", {}, "no cache 'statik'; nearest: static"),
        ("static", {"step": "0,1"}, "static has no parameter 'step'; nearest: steps"),
        ("static", {}, "static needs steps"),
        ("static", {"steps": "1,2"}, "step 0 has nothing to reuse"),
        ("static", {"steps": "0,-1"}, "whole numbers from 0"),
        ("static", {"steps": "0,a"}, "whole numbers from 0"),
        ("static", {"steps": "0,1.5"}, "whole numbers from 0"),
    ],
)
def test_words_that_are_not_understood(name: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(PatchError, match=message):
        make_params(name, options)


def test_words_become_parameters() -> None:
    assert make_params("static", {"steps": "0,1,2,4"}) == Static(steps=(4, 2, 1, 0)) == Static(steps=[0, 1, 2, 4])
    assert make_params("static", {"steps": "0"}).steps == (0,)
