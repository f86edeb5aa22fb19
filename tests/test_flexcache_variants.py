"""Caches on pipelines that call a denoiser in another way: ControlNet, skip-layer guidance, IP-Adapter, images."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from caches import ACTS, EXACT, fitting, ready
from variants import VARIANTS

from chitu_diffusion import patch

pytestmark = pytest.mark.filterwarnings("ignore::chitu_hooks.ChituWarning")
USUAL = ("flux controlnet, for a while", "sd3 without the last layer", "chroma controlnet, in place")
NAMES = [
    name if name in USUAL else pytest.param(name, marks=pytest.mark.slow)
    for name in VARIANTS
    if name != "wan, two experts"  # it has more steps, and a test of its own
]


@pytest.mark.parametrize("name", NAMES)
def test_exact_at_full_budget_and_lossy_otherwise(name: str) -> None:
    variant = VARIANTS[name]()
    stock = variant.call()
    for label, params in EXACT.items():
        with patch(variant.pipe, cache=ready(variant.pipe, params)):
            assert torch.equal(variant.call(), stock), label
    for label, params in ACTS.items():
        with patch(variant.pipe, cache=ready(variant.pipe, fitting(name, params, _blocks(variant.pipe)))) as handle:
            result = variant.call()
            assert result.isfinite().all(), label
            assert torch.equal(variant.call(), result), label
            hit = handle.report().features[0]["hits"] > 0
            assert hit or label == "static published", "stretched to so few steps, that one computes them all"


def _blocks(pipe: Any) -> int:
    with patch(pipe) as handle:
        return min(sum(len(s.blocks) for s in d.stacks if not s.refiner) for d in handle.sites.denoisers)
