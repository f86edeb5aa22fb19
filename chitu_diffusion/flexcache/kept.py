"""Attention kept from one step to a later one: the outputs of whole layers, and in code that torch.compile traces those of
attention alone.

Traced code may read no state that changes, so keeping and recalling are two opaque operators that look up, when they run,
what the branch of the call underway keeps. Layers are told apart by a tensor, so that all of them share one graph. There a
compiler leaves out the projections that nobody reads; in eager mode the layer as a whole is left out.

Shape legend: B batch, S query tokens, T key tokens, H heads, D head dim.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from chitu_hooks import AttentionContext, Feature, Order
from chitu_hooks.attention import Frame
from chitu_hooks.call import map_tensors
from chitu_hooks.sites import AttentionSite
from chitu_hooks.state import ACTIVE

NAME = "pab"
"""Name of the feature whose memory holds the outputs."""

PARTS = re.compile(
    r"(to|add)_(q|k|v|kv|qkv|out|add_out|added_qkv)(_proj)?(_t)?|norm_(added_)?(q|k)|norm_cross|[qk]_rms_norm(_t)?"
)
"""Names of the parts of a layer that does nothing but attention: projections and norms. A gate or an MLP is none of them."""


def only_attends(site: AttentionSite) -> bool:
    """Whether what the layer at `site` returns comes from attention alone, so that it can be left out as a whole."""
    module = site.module
    plain = site.reachable and not getattr(module, "residual_connection", False)
    return plain and all(PARTS.fullmatch(name) for name, _ in module.named_children())


def has_parts(site: AttentionSite) -> bool:
    """Whether the processor just now has weights of its own, an image prompt's say."""
    return isinstance(getattr(site.module, "processor", None), torch.nn.Module)


def outputs() -> dict[Any, Any]:
    """Of the branch of the denoiser call underway: `turn` of the layer's number and of the call within it -> output (B, S, H, D),
    and `turn` of the layer's path -> what its processor returned."""
    call = ACTIVE.call
    assert call is not None
    return call.branch.memory.spaces[NAME].outputs


def turn(place: Any) -> tuple[Any, int]:
    """`place`, and how often it came before in the denoiser call underway: some blocks call a layer for each window of frames."""
    call = ACTIVE.call
    assert call is not None
    turns = call.branch.memory.spaces[NAME].turns
    turns[place] += 1
    return place, turns[place] - 1


def work() -> dict[Any, int]:
    """The same -> FLOPs of the attention."""
    call = ACTIVE.call
    assert call is not None
    return call.branch.memory.spaces[NAME].work


@torch.library.custom_op("chitu::keep_attention", mutates_args=("layer",))
def keep(layer: torch.Tensor, part: int, out_BSHD: torch.Tensor, pairs: int) -> None:
    """Keep a copy of what call `part` of `layer` returned, for so many pairs of a query and a key, on all ranks together.

    It declares to write to `layer`, which it does not, so that it is not optimised away.
    """
    place = turn((int(layer), part))
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
    place = turn((int(layer), part))
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

    def attention_layer(self, frame: Frame, rest: Callable[[], Any]) -> Any | None:
        kept = None if frame.site is None else outputs().get(turn(frame.site.path))
        if kept is None or frame.site is None:
            return None
        call: Any = ACTIVE.call
        call.generation.left_out.setdefault((call.denoiser.name, call.branch.name), Counter())[frame.site.path] += 1
        return map_tensors(kept, torch.Tensor.clone)

    def attention(
        self, q_BSHD: torch.Tensor, k_BTHD: torch.Tensor, v_BTHD: torch.Tensor, ctx: AttentionContext
    ) -> torch.Tensor | None:
        if ctx.site is None or ctx.frame is None or ctx.kind(q_BSHD.shape[1], k_BTHD.shape[1]) not in self.kinds:
            return None
        # The shape goes in, and not the queries, so that a compiler need not project what nobody reads.
        shape = [*q_BSHD.shape[:3], v_BTHD.shape[3]]
        return recall(ctx.site.layer, ctx.part, ctx.frame.hidden_states, shape).to(q_BSHD.dtype)
