"""Attention outputs kept from one step to a later one, in code that torch.compile traces.

Traced code may read no state that changes, so keeping and recalling are two opaque operators that look up, when they run,
what the branch of the call underway keeps. Layers are told apart by a tensor, so that all of them share one graph.

Shape legend: B batch, S query tokens, T key tokens, H heads, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch

from chitu_hooks.state import ACTIVE

NAME = "pab"
"""Name of the feature whose memory holds the outputs."""


def outputs() -> dict[int, torch.Tensor]:
    """Number of the layer -> output (B, S, H, D), of the branch of the denoiser call underway."""
    call = ACTIVE.call
    assert call is not None
    return call.branch.memory.spaces[NAME].outputs


def work() -> dict[int, int]:
    """Number of the layer -> FLOPs of its attention."""
    call = ACTIVE.call
    assert call is not None
    return call.branch.memory.spaces[NAME].work


@torch.library.custom_op("chitu::keep_attention", mutates_args=("layer",))
def keep(layer: torch.Tensor, out_BSHD: torch.Tensor, keys: int) -> None:
    """Keep a copy of the output of `layer`.

    It declares to write to `layer`, which it does not, so that it is not optimised away.
    """
    number = int(layer)
    outputs()[number] = out_BSHD.clone()
    batch, queries, heads, dim = out_BSHD.shape
    work()[number] = 4 * batch * heads * queries * keys * dim


@keep.register_fake
def _keep(layer: torch.Tensor, out_BSHD: torch.Tensor, keys: int) -> None:
    return None


@torch.library.custom_op("chitu::recall_attention", mutates_args=())
def recall(layer: torch.Tensor, like: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """What `layer` returned when it was last kept, (B, S, H, D), of the dtype and on the device of `like`."""
    call: Any = ACTIVE.call
    number = int(layer)
    call.generation.saved_flops += work()[number]
    return outputs()[number].clone()


@recall.register_fake
def _recall(layer: torch.Tensor, like: torch.Tensor, shape: list[int]) -> torch.Tensor:
    return like.new_empty(shape)
