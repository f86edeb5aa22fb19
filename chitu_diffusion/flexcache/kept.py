"""Attention outputs kept from one step to a later one, in code that torch.compile traces.

Traced code may read no state that changes, so keeping and recalling are two opaque operators that look up, when they run,
what the branch of the call underway keeps. Layers are told apart by a tensor, so that all of them share one graph.

Shape legend: B batch, S query tokens, T key tokens, H heads, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch

from chitu_hooks import AttentionContext, Feature, Order
from chitu_hooks.state import ACTIVE

NAME = "pab"
"""Name of the feature whose memory holds the outputs."""


def outputs() -> dict[tuple[int, int], torch.Tensor]:
    """Number of the layer and of the call within it -> output (B, S, H, D), of the branch of the denoiser call underway."""
    call = ACTIVE.call
    assert call is not None
    return call.branch.memory.spaces[NAME].outputs


def work() -> dict[tuple[int, int], int]:
    """The same -> FLOPs of the attention."""
    call = ACTIVE.call
    assert call is not None
    return call.branch.memory.spaces[NAME].work


@torch.library.custom_op("chitu::keep_attention", mutates_args=("layer",))
def keep(layer: torch.Tensor, part: int, out_BSHD: torch.Tensor, pairs: int) -> None:
    """Keep a copy of what call `part` of `layer` returned, for so many pairs of a query and a key, on all ranks together.

    It declares to write to `layer`, which it does not, so that it is not optimised away.
    """
    place = int(layer), part
    outputs()[place] = out_BSHD.clone()
    batch, _, heads, dim = out_BSHD.shape
    work()[place] = 4 * batch * heads * pairs * dim


@keep.register_fake
def _keep(layer: torch.Tensor, part: int, out_BSHD: torch.Tensor, pairs: int) -> None:
    return None


@torch.library.custom_op("chitu::recall_attention", mutates_args=())
def recall(layer: torch.Tensor, part: int, like: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """What call `part` of `layer` returned when it was last kept, (B, S, H, D), of the dtype and on the device of `like`."""
    call: Any = ACTIVE.call
    place = int(layer), part
    call.generation.saved_flops += work()[place]
    return outputs()[place].clone()


@recall.register_fake
def _recall(layer: torch.Tensor, part: int, like: torch.Tensor, shape: list[int]) -> torch.Tensor:
    return like.new_empty(shape)


class Recall(Feature):
    """Stands in the place of the feature that keeps, in calls that reuse: only the operator runs."""

    name = "pab, reusing"
    order = Order.CACHE

    def __init__(self, kinds: tuple[str, ...]) -> None:
        self.kinds = kinds

    def attention(
        self, q_BSHD: torch.Tensor, k_BTHD: torch.Tensor, v_BTHD: torch.Tensor, ctx: AttentionContext
    ) -> torch.Tensor | None:
        if ctx.site is None or ctx.frame is None or ctx.kind(q_BSHD.shape[1], k_BTHD.shape[1]) not in self.kinds:
            return None
        # The shape goes in, and not the queries, so that a compiler need not project what nobody reads.
        shape = [*q_BSHD.shape[:3], v_BTHD.shape[3]]
        return recall(ctx.site.layer, ctx.part, ctx.frame.hidden_states, shape).to(q_BSHD.dtype)
