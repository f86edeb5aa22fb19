"""Contract 1 and the step cache on ControlNets, skip-layer guidance, IP-Adapter, img2img, inpainting, two experts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from probes import Keep, SdpaCounter, Watch, difference, every
from variants import VARIANTS, flux_controlnet

from chitu_hooks import Feature, patch

each_variant = pytest.mark.parametrize("name", VARIANTS)


@each_variant
def test_the_variant_acts(name: str) -> None:
    """Without this, every test below could pass on the plain pipeline."""
    variant = VARIANTS[name]()
    if variant.plain is not None:
        assert difference(variant.call(), variant.plain()) > 1e-3


@each_variant
def test_watching_changes_nothing(name: str) -> None:
    variant, watch = VARIANTS[name](), Watch()
    before = variant.call()
    with patch(variant.pipe, [watch]) as handle:
        assert torch.equal(variant.call(), before)
        assert torch.equal(variant.call(), before)
        calls = sum(branch["computed"] for branch in handle.report().branches.values())
    assert watch.counts["denoiser_in"] == 2 * calls > 0
    assert watch.counts["block_in"] > calls
    assert watch.counts["attention"] > calls
    assert len(set(watch.branches)) == variant.branches
    assert torch.equal(variant.call(), before)


@each_variant
def test_a_full_budget_changes_nothing(name: str) -> None:
    variant, cache = VARIANTS[name](), every()
    before = variant.call()
    with patch(variant.pipe, [cache]):
        assert torch.equal(variant.call(), before)
        assert torch.equal(variant.call(), before)
    assert cache.log and not any(cache.skips)


@each_variant
def test_half_the_budget_hits_in_every_branch(name: str) -> None:
    variant, cache = VARIANTS[name](), Keep(*range(0, 12, 2))
    before = variant.call()
    with patch(variant.pipe, [cache]) as handle:
        first = variant.call()
        assert not torch.equal(first, before)
        assert torch.isfinite(first).all()
        assert torch.equal(variant.call(), first)
        branches = handle.report().branches
    denoisers = {key.split("/")[0] for key in branches}
    assert len(denoisers) == variant.denoisers
    assert len(branches) == variant.branches * len(denoisers)
    assert all(calls["skipped"] for calls in branches.values()), branches
    assert torch.equal(variant.call(), before)


class SkipWhenTold(Feature):
    name = "skip when told"
    skips_trunk = True
    told = False

    def denoiser_in(self, call: Any) -> None:
        if self.told:
            call.skip_trunk()


@each_variant
def test_a_skipped_call_replays_the_computed_one(name: str) -> None:
    """Also where the model adds ControlNet samples between the blocks that pass on: added again they would double."""
    variant, seen, skip = VARIANTS[name](), {}, SkipWhenTold()
    denoiser = variant.pipe.transformer
    recorder = denoiser.register_forward_pre_hook(
        lambda _, args, kwargs: seen.__setitem__(repr(kwargs.get("skip_layers")), (args, kwargs)), with_kwargs=True
    )
    variant.call()
    recorder.remove()
    for args, kwargs in seen.values():
        with patch(variant.pipe, [skip]) as handle, handle._engine.generate(variant.pipe):
            skip.told = False
            with SdpaCounter() as computed:
                one = denoiser(*args, **kwargs)[0]
            skip.told = True
            with SdpaCounter() as skipped:
                other = denoiser(*args, **kwargs)[0]
            assert skipped.calls < computed.calls
            assert difference(other, one) <= 1e-6


def test_controlnet_samples_that_vanish_are_not_reused() -> None:
    """Where the interval begins and ends, the residual of the step before has the wrong additions in it."""
    variant = flux_controlnet(control_guidance_start=0.25, control_guidance_end=0.7)
    cache = Keep(0)
    with patch(variant.pipe, [cache]):
        variant.call()
    assert cache.skips == [False, True, False, True, True, False, True, True]


def test_a_controlnet_that_stays_on_is_reused() -> None:
    cache = Keep(0)
    variant = flux_controlnet()
    with patch(variant.pipe, [cache]):
        variant.call()
    assert Counter(cache.skips) == {False: 1, True: 7}
