"""xformers' memory-efficient attention (https://github.com/facebookresearch/xformers)."""

from __future__ import annotations

import torch
from torch import Tensor

from .kernel import FLOATS, MASKS, Abilities, Kernel
from .packages import built_for_other_cuda, missing
from .sdpa import additive, rows


class Xformers(Kernel):
    """xformers: takes additive masks of the full (B, H, S, T) shape, into which any other is turned here."""

    name = "xformers"
    abilities = Abilities(
        dtypes=FLOATS, max_head_dim=256, head_dim_multiple=8, masks=MASKS, causal=False, capability=(7, 0)
    )

    def available(self) -> str | None:
        reason = missing("xformers", "xformers")
        return self.abilities.capability_refusal() or reason or built_for_other_cuda("xformers")

    def load(self) -> None:
        import xformers.ops  # noqa: F401  (fails here, by name, and not in the middle of a step)

    def run(
        self, q_BSHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, mask: Tensor | None, causal: bool, scale: float | None
    ) -> Tensor:
        return _attend(q_BSHD, k_BTGD, v_BTGD, mask, scale)


@torch.library.custom_op("chitu::xformers_attention", mutates_args=())
def _attend(q_BSHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """One opaque operator, so that torch.compile does not look into xformers' choice of kernel."""
    from xformers.ops import memory_efficient_attention

    B, S, H, _ = q_BSHD.shape
    T, G = k_BTGD.shape[1:3]
    if G != H:
        k_BTGD, v_BTGD = (t.repeat_interleave(H // G, 2) for t in (k_BTGD, v_BTGD))
    bias = rows(additive(mask, q_BSHD), k_BTGD.transpose(1, 2))
    if bias is not None:
        bias = bias.expand(B, H, S, T)
    return memory_efficient_attention(q_BSHD, k_BTGD, v_BTGD, attn_bias=bias, scale=scale).contiguous()


@_attend.register_fake
def _(q_BSHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    return torch.empty_like(q_BSHD, memory_format=torch.contiguous_format)
