"""Where an attention feature is told that the text is: checked by changing the text and looking which values move."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from probes import SdpaCounter
from tiny import build, run

from chitu_diffusion import patch as patch_by_words
from chitu_hooks import Feature, GenerationError, Order, patch

JOINT = ("flux", "flux2", "flux2_klein", "qwen", "sd3")
"""Pipelines with a hook map and attention over text and image together."""


class FirstLayer(Feature):
    """Keeps kind, span and values of the first attention call of one generation."""

    name = "first layer"
    order = Order.KERNEL

    def __init__(self) -> None:
        self.kind = ""
        self.span = (0, 0)
        self.values: torch.Tensor | None = None

    def attention(self, q_BSHD: torch.Tensor, k_BTHD: torch.Tensor, v_BTHD: torch.Tensor, ctx: Any) -> None:
        if self.values is None:
            self.kind = ctx.kind(q_BSHD.shape[1], k_BTHD.shape[1])
            self.span = ctx.text_span(q_BSHD.shape[1])
            self.values = v_BTHD.clone()


def first_layer(name: str, prompt: int) -> FirstLayer:
    layer = FirstLayer()
    pipe = build(name)
    with patch_by_words(pipe, features=(layer,)), SdpaCounter():
        run(name, pipe, 1, prompt=prompt, length=7, guided=name in ("sd3", "flux2"))
    return layer


@pytest.mark.parametrize("name", JOINT)
def test_the_rows_that_move_with_the_text_are_the_span(name: str) -> None:
    """In the first layer text and image have not met yet; modulation by pooled text moves all rows, but the norm is even."""
    one, other = first_layer(name, 0), first_layer(name, 1)
    assert one.kind == other.kind == "joint"
    moved = (one.values - other.values).abs().amax(dim=(0, 2, 3))
    start, stop = one.span
    assert stop - start == 7
    inside = torch.zeros_like(moved, dtype=torch.bool)
    inside[start:stop] = True
    assert moved[inside].min() > 3 * moved[~inside].mean()


@pytest.mark.parametrize("name", JOINT)
def test_an_inferred_map_does_not_guess_the_order(name: str) -> None:
    pipe = build(name)
    with patch(pipe, [FirstLayer()]), pytest.raises(GenerationError, match="hook map"):
        run(name, pipe, 1)
