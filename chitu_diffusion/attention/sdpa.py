"""torch's own scaled-dot-product kernels, called by their operators.

The operators are called directly, not through `torch.nn.attention.sdpa_kernel`: that switches process-wide flags, which
another thread's pipeline would see. What `F.scaled_dot_product_attention` does around them (boolean masks made additive,
head dims padded) is done here in the same way; see aten/src/ATen/native/transformers/attention.cpp in pytorch.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .kernel import FLOATS, HALF, Abilities, AttentionCall, Kernel

aten = torch.ops.aten


class SdpaMath(Kernel):
    """Plain matrix products and a softmax: anything, anywhere, slowly."""

    name = "sdpa_math"
    abilities = Abilities(
        devices=("cpu", "cuda", "mps", "xpu"),
        dtypes=(*FLOATS, torch.float64),
        max_head_dim=2**16,
        mask=True,
        causal_cross=True,
    )

    def run(
        self, q_BSHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, mask: Tensor | None, causal: bool, scale: float | None
    ) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q_BSHD, k_BTGD, v_BTGD))
        grouped = q.shape[1] != k.shape[1]
        out, _ = aten._scaled_dot_product_attention_math(
            q, k, v, mask, 0.0, causal, None, scale=scale, enable_gqa=grouped
        )
        return out.transpose(1, 2)


class SdpaFlash(Kernel):
    """FlashAttention-2 on CUDA; torch's blocked kernel on the CPU, which also takes masks."""

    name = "sdpa_flash"
    returns_lse = True
    on_cpu = Abilities(devices=("cpu",), dtypes=FLOATS, max_head_dim=2**16, mask=True)
    abilities = Abilities(devices=("cuda",), dtypes=HALF, max_head_dim=256)

    def refusal(self, call: AttentionCall) -> str | None:
        if call.device == "cpu":
            return self.on_cpu.refusal(call)
        if call.device != "cuda":
            return f"runs on cpu and cuda, not on {call.device}"
        return self.abilities.refusal(call)

    def run(
        self, q_BSHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, mask: Tensor | None, causal: bool, scale: float | None
    ) -> Tensor:
        q, k, v = _heads_first(q_BSHD, k_BTGD, v_BTGD)
        if q.device.type == "cpu":
            bias = _additive(mask, q)
            out, _ = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
            return out.transpose(1, 2)
        dim = q.shape[-1]
        scale = scale if scale is not None else 1 / math.sqrt(dim)
        q, k, v = (_pad_last(t, 8) for t in (q, k, v))
        out = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[0]
        return out[..., :dim].transpose(1, 2)


class SdpaEfficient(Kernel):
    """The memory-efficient kernel of xformers, as shipped with torch."""

    name = "sdpa_efficient"
    returns_lse = True
    abilities = Abilities(dtypes=FLOATS, max_head_dim=2**16, mask=True)

    def available(self) -> str | None:
        return self.abilities.capability_refusal()

    def run(
        self, q_BSHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, mask: Tensor | None, causal: bool, scale: float | None
    ) -> Tensor:
        q, k, v = _heads_first(q_BSHD, k_BTGD, v_BTGD)
        dim = q.shape[-1]
        scale = scale if scale is not None else 1 / math.sqrt(dim)
        q, k, v = (_pad_last(t, 8) for t in (q, k, v))
        bias = _full(_additive(mask, q), q, k)
        out = aten._scaled_dot_product_efficient_attention(q, k, v, bias, False, 0.0, causal, scale=scale)[0]
        return out[..., :dim].transpose(1, 2)


class SdpaCudnn(Kernel):
    """cuDNN's fused attention; the fastest of torch's own on Hopper."""

    name = "sdpa_cudnn"
    returns_lse = True
    abilities = Abilities(dtypes=HALF, max_head_dim=128, head_dim_multiple=8, mask=True, capability=(8, 0))

    def available(self) -> str | None:
        return self.abilities.capability_refusal()

    def run(
        self, q_BSHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, mask: Tensor | None, causal: bool, scale: float | None
    ) -> Tensor:
        q, k, v = _heads_first(q_BSHD, k_BTGD, v_BTGD)
        bias = _full(_additive(mask, q), q, k)
        out = aten._scaled_dot_product_cudnn_attention(q, k, v, bias, False, 0.0, causal, False, scale=scale)[0]
        return out.transpose(1, 2)


def _heads_first(q_BSHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor) -> tuple[Tensor, ...]:
    """(B, H, S, D) views; key heads repeated to the number of query heads where there are fewer."""
    q, k, v = (t.transpose(1, 2) for t in (q_BSHD, k_BTGD, v_BTGD))
    if k.shape[1] != q.shape[1]:
        repeat = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    return q, k, v


def _additive(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """A boolean mask as zeros and minus infinities in q's dtype."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask.logical_not(), -math.inf)


def _full(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The bias expanded to (B, H, S, T), its last dimension aligned to 16 elements as the kernels want it."""
    if bias is None:
        return None
    (B, H, S, _), T = q.shape, k.shape[2]
    bias = bias.to(q.dtype)
    bias = bias[(None,) * (4 - bias.dim())]
    if T % 16:
        bias = F.pad(bias.expand(*bias.shape[:3], T), (0, 16 - T % 16))[..., :T]
    return bias.expand(B, H, S, T)


def _pad_last(tensor: Tensor, multiple: int) -> Tensor:
    missing = -tensor.shape[-1] % multiple
    return F.pad(tensor, (0, missing)) if missing else tensor
