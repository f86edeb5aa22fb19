"""UNets have no trunk: attention, denoiser and clock work there, and whatever needs blocks is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from probes import Formula, Keep, Scale, SdpaCounter, Watch, difference, every
from variants import STEPS, unet_pipeline

from chitu_diffusion import Static
from chitu_diffusion import patch as patch_by_words
from chitu_hooks import Feature, RefusedError, patch


class Outside(Feature):
    """Watches the seams that a UNet has."""

    name = "outside"

    def __init__(self) -> None:
        self.calls = self.attentions = 0

    def denoiser_in(self, call: Any) -> None:
        self.calls += 1

    def attention(self, *_: Any) -> None:
        self.attentions += 1


def test_watching_changes_nothing() -> None:
    unet, outside = unet_pipeline(), Outside()
    with SdpaCounter() as stock:
        before = unet.call()
    with patch(unet.pipe, [outside]) as handle:
        assert torch.equal(unet.call(), before)
        assert handle.report().sites["stacks"] == 0
    assert outside.calls == STEPS
    assert outside.attentions == stock.calls > 0
    assert torch.equal(unet.call(), before)


def test_another_kernel_and_another_factor_act() -> None:
    unet = unet_pipeline()
    before = unet.call()
    with patch(unet.pipe, [Formula()]):
        assert difference(unet.call(), before) < 1e-4
    with patch(unet.pipe, [Scale()]):
        assert not torch.equal(unet.call(), before)
    with patch_by_words(unet.pipe, attention="sdpa_math"), SdpaCounter():
        assert difference(unet.call(), before) < 1e-4


@pytest.mark.parametrize("feature", (Keep(0), every(), Watch()), ids=lambda feature: feature.name)
def test_what_needs_blocks_is_refused(feature: Feature) -> None:
    unet = unet_pipeline()
    before, attributes = unet.call(), dict(vars(unet.pipe))
    with pytest.raises(RefusedError, match=rf"{feature.name}: unet \(UNet2DConditionModel\) has no stack of blocks"):
        patch(unet.pipe, [Scale(), feature])
    assert vars(unet.pipe) == attributes
    assert torch.equal(unet.call(), before)


def test_a_cache_by_words_is_refused() -> None:
    with pytest.raises(RefusedError, match="static: unet"):
        patch_by_words(unet_pipeline().pipe, cache=Static(steps=(0, 1)))


def test_what_joins_later_is_refused_too() -> None:
    unet = unet_pipeline()
    with patch(unet.pipe, [Scale()]) as handle, pytest.raises(RefusedError, match="keep: unet"):
        with handle.also(Keep(0)):
            pass
