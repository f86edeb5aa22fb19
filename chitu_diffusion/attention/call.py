"""What one attention call, or the weights of one attention layer, tell about what a kernel has to be able to do.

Shape legend: B batch, S query tokens, T key tokens, H heads, G key heads, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from chitu_hooks import AttentionContext

from .kernel import ADDITIVE, BOOLEAN, KEY, AttentionCall

AMBIGUOUS = "two dimensions that fit both (batch, keys) and (queries, keys)"


def real_call(
    q_BSHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, mask: Any, ctx: AttentionContext, key_block: int = 1
) -> AttentionCall:
    """The call as it is made; `mask` is what `broadcast_mask` made of its mask. Traced by torch.compile."""
    _, S, H, D = q_BSHD.shape
    _, T, G, _ = k_BTGD.shape
    foreign = "" if not ctx.extra else ", ".join(ctx.extra)
    if ctx.native_parallel is not None:
        foreign = "context parallelism of diffusers"
    gradient = torch.is_grad_enabled() and (q_BSHD.requires_grad or k_BTGD.requires_grad or v_BTGD.requires_grad)
    # By position, and each shape once: this runs at every attention call.
    return AttentionCall(
        q_BSHD.dtype,
        q_BSHD.device.type,
        D,
        H,
        G,
        v_BTGD.shape[3],
        mask_kind(mask),
        ctx.causal,
        ctx.dropout,
        not ctx.causal or _true(S == T),  # compared only where it matters: a comparison is a guard in a graph
        _true(T == 1),
        gradient,
        foreign,
        T if key_block > 1 else 0,
    )


def _true(condition: bool) -> bool:
    """`condition` as a constant: lengths that change from call to call compare to something that is none yet."""
    return True if condition else False  # noqa: SIM210


def broadcast_mask(q_BSHD: Tensor, k_BTGD: Tensor, mask: Any) -> Any:
    """The mask in a form that broadcasts to (B, H, S, T).

    diffusers' dispatcher also takes one entry for each key, (B, T), where torch would read (S, T). A mask that fits
    both becomes `AMBIGUOUS`, a word that no kernel takes.
    """
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return mask
    B, S = q_BSHD.shape[:2]
    rows, columns = mask.shape
    if rows == 1 or rows != B or columns != k_BTGD.shape[1]:
        return mask
    return AMBIGUOUS if B == S else mask[:, None, None, :]


def mask_kind(mask: Any) -> str:
    """Which of `MASKS` it is, "" for None, else a word for what it is."""
    if mask is None:
        return ""
    if isinstance(mask, str):
        return mask
    if not isinstance(mask, Tensor):
        return f"class {type(mask).__name__}"
    if mask.dtype == torch.bool:
        keys_only = (mask.dim() < 2 or mask.shape[-2] == 1) and (mask.dim() < 3 or mask.shape[-3] == 1)
        return KEY if keys_only else BOOLEAN
    return ADDITIVE if mask.dtype.is_floating_point else str(mask.dtype)


def assumed_call(module: torch.nn.Module) -> AttentionCall | None:
    """What the weights alone tell of a layer's calls; None where they do not tell, so that the second gate decides."""
    heads, inner = getattr(module, "heads", None), getattr(module, "inner_dim", None)
    projection = getattr(module, "to_q", None) or getattr(module, "to_qkv", None)
    weight = getattr(projection, "weight", None)  # not just any: some models keep their norms in float32
    if not isinstance(heads, int) or not isinstance(inner, int) or not isinstance(weight, Tensor):
        return None
    if not weight.is_floating_point() or weight.dtype.itemsize < 2:
        return None  # quantised: what it computes in is for the second gate to see
    if weight.device.type == "meta" or (weight.device.type == "cpu" and torch.cuda.is_available()):
        return None  # offloaded: where it will run, and in which dtype, is for the second gate to see
    dim = inner // heads
    return AttentionCall(weight.dtype, weight.device.type, dim, heads, heads, dim)
