"""Keys and values of tokens that are not computed, kept from the step at which they were, in code that torch.compile traces.

As in `kept`, two opaque operators look up, when they run, what the branch of the call underway keeps. Eager code calls what they
do: an operator's way through the dispatcher costs the host more than the copies in it.

Shape legend: B batch, s query and fresh key tokens, T all key tokens, H heads, h key heads, D head dim.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from chitu_hooks import AttentionContext, Branch, Feature, GenerationError, Order
from chitu_hooks.state import ACTIVE

SPACE = "frozen keys"
"""Name of the space in a branch's memory that holds the keys and values."""


def frozen_keys(branch: Branch) -> SimpleNamespace:
    """What `branch` keeps: ``kept``, number of the layer and of the call within it -> keys and values, (B, T, h, D) each;
    ``open``, whether the trunk is underway; ``keeping``, whether a later step may need what is computed now."""
    spaces = branch.memory.spaces
    if SPACE not in spaces:
        spaces[SPACE] = SimpleNamespace(kept={}, open=False, keeping=False)
    return spaces[SPACE]


def _keys() -> SimpleNamespace:
    call = ACTIVE.call
    assert call is not None
    return frozen_keys(call.branch)


def keep_now(layer: Tensor, part: int, k_BThD: Tensor, v_BThD: Tensor) -> None:
    """Keep a copy of all keys and values of call `part` of `layer`, if a later step may need them."""
    keys = _keys()
    if keys.open and keys.keeping:
        keys.kept[int(layer), part] = (k_BThD.clone(), v_BThD.clone())


keep = torch.library.custom_op("chitu::keep_keys", keep_now, mutates_args=("layer",))
"""`keep_now` in traced code. It declares to write to `layer`, which it does not, so that it is not optimised away."""


@keep.register_fake
def _keep(layer: Tensor, part: int, k_BThD: Tensor, v_BThD: Tensor) -> None:
    return None


def fill_now(
    layer: Tensor, part: int, k_BshD: Tensor, v_BshD: Tensor, places: Tensor, tokens: int, heads: int
) -> tuple[Tensor, Tensor]:
    """All keys and values: the fresh ones at `places` (s,), which replace the kept ones, and those kept of other tokens.

    They are what is kept, and only to be read.
    """
    kept = _keys().kept.get((int(layer), part))
    if kept is None or kept[0].shape[1] != tokens:
        raise GenerationError(
            f"attention layer {int(layer)} ran on {len(places)} tokens and has no keys of {tokens} tokens from a step "
            "that computed them all"
        )
    batch, fresh, _, dim = k_BshD.shape
    call: Any = ACTIVE.call
    call.generation.saved_flops -= (
        4 * batch * heads * fresh * (tokens - fresh) * dim
    )  # attention on keys that were kept
    for whole, part_of in zip(kept, (k_BshD, v_BshD)):
        whole.index_copy_(1, places, part_of)
    return kept


@torch.library.custom_op("chitu::fill_keys", mutates_args=("layer",))
def fill(
    layer: Tensor, part: int, k_BshD: Tensor, v_BshD: Tensor, places: Tensor, tokens: int, heads: int
) -> tuple[Tensor, Tensor]:
    """`fill_now` in traced code: a copy, since a compiler may write over what an operator returned."""
    k_BThD, v_BThD = fill_now(layer, part, k_BshD, v_BshD, places, tokens, heads)
    return k_BThD.clone(), v_BThD.clone()


@fill.register_fake
def _fill(
    layer: Tensor, part: int, k_BshD: Tensor, v_BshD: Tensor, places: Tensor, tokens: int, heads: int
) -> tuple[Tensor, Tensor]:
    batch, _, key_heads, dim = k_BshD.shape
    return k_BshD.new_empty(batch, tokens, key_heads, dim), v_BshD.new_empty(batch, tokens, key_heads, v_BshD.shape[3])


class Fill(Feature):
    """Stands in the place of the feature that keeps, in calls on fewer tokens: their queries see all keys."""

    name = "fewer tokens"
    order = Order.CACHE

    def attention(self, q_BsHD: Tensor, k_BshD: Tensor, v_BshD: Tensor, ctx: AttentionContext) -> Tensor | None:
        few, queries, keys = ACTIVE.layout, q_BsHD.shape[1], k_BshD.shape[1]
        if few is None or ctx.site is None or ctx.kind(queries, keys) == "cross":
            return None
        count = few.image.shape[0]
        if keys == count:
            places, tokens = few.image, few.tokens
        elif keys == few.joint.shape[0]:
            places, tokens = few.joint, few.tokens + keys - count
        else:
            raise GenerationError(
                f"{ctx.layer}: attention on {keys} keys, where {count} image and {few.joint.shape[0] - count} text tokens are "
                "computed"
            )
        if queries != keys or ctx.causal:
            raise GenerationError(f"{ctx.layer}: tokens cannot be left out of attention that is causal or not square")
        filling = fill if torch.compiler.is_compiling() else fill_now
        k_BThD, v_BThD = filling(ctx.site.layer, ctx.part, k_BshD, v_BshD, places, tokens, q_BsHD.shape[2])
        mask = ctx.mask
        if mask is not None:
            ctx.mask = mask_of_fewer(mask, places, tokens)
        try:
            return ctx.next(q_BsHD, k_BThD, v_BThD)
        finally:
            ctx.mask = mask


def mask_of_fewer(mask: Tensor, places: Tensor, tokens: int) -> Tensor:
    """A mask (…, s or 1, T or 1) for the queries at `places`.

    A mask of all queries loses rows. One that the model made for the fresh keys only gets columns that hide nothing: such
    masks hide text, which is always fresh.
    """
    if mask.dim() >= 2 and mask.shape[-2] == tokens:
        mask = mask.index_select(-2, places)
    if mask.shape[-1] == places.shape[0]:
        seen = 1 if mask.dtype == torch.bool else 0
        mask = mask.new_full((*mask.shape[:-1], tokens), seen).index_copy(-1, places, mask)
    return mask
