"""Perturbed attention guidance: processors that are put in after the pipeline's call began, with two attention calls each."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from variants_more import FURTHER_VARIANTS, PERTURBED

from chitu_diffusion import Feature, Parallel, Static, patch
from chitu_hooks import PatchError

NAMES = [f"{name}, perturbed attention" for name in PERTURBED]


class Parts(Feature):
    """Counts the attention calls of each layer, by their place in the processor's call."""

    name = "parts"

    def __init__(self) -> None:
        self.seen: Counter[tuple[str, int]] = Counter()

    def attention(self, q_BSHD: torch.Tensor, k_BTHD: torch.Tensor, v_BTHD: torch.Tensor, ctx: Any) -> None:
        self.seen[ctx.site.path, ctx.part] += 1


def test_both_calls_of_the_processor_are_seen_and_none_is_hooked_after_undo() -> None:
    variant, parts = FURTHER_VARIANTS["sd3, perturbed attention"](), Parts()
    stock = variant.call()
    assert not torch.equal(stock, variant.plain()), "the variant acts"
    kinds = [type(processor) for processor in variant.pipe._pag_attn_processors]
    with patch(variant.pipe, features=(parts,)) as handle:
        assert handle.hook_map.source == "registry"
        assert torch.equal(variant.call(), stock)
        steps = handle.report().steps
    assert parts.seen["transformer_blocks.1.attn", 0] == parts.seen["transformer_blocks.1.attn", 1] == steps
    assert ("transformer_blocks.0.attn", 1) not in parts.seen
    assert [type(processor) for processor in variant.pipe._pag_attn_processors] == kinds
    assert torch.equal(variant.call(), stock)


@pytest.mark.parametrize("name", NAMES)
def test_caches_hit(name: str) -> None:
    variant = FURTHER_VARIANTS[name]()
    stock = variant.call()
    with patch(variant.pipe, cache=Static(steps=(0, 2, 4, 6))) as handle:
        assert not torch.equal(variant.call(), stock)
        assert handle.report().features[0]["hits"] > 0


@pytest.mark.parametrize("parallel", [Parallel(cfg=2), Parallel(ulysses=2), Parallel(ring=2), Parallel(gather=2)])
def test_several_ranks_are_refused(parallel: Parallel) -> None:
    """Each rank would perturb a part of what it has, and mask as many tokens as it has."""
    variant = FURTHER_VARIANTS["sd3, perturbed attention"]()
    with pytest.raises(PatchError, match=r"StableDiffusion3PAGPipeline perturbs attention .* on one process, not on 2"):
        patch(variant.pipe, parallel=parallel)
