"""torch's own scaled-dot-product kernels, called by their operators.

The operators are called directly, not through `torch.nn.attention.sdpa_kernel`: that switches process-wide flags, which
another thread's pipeline would see. What `F.scaled_dot_product_attention` does around them (boolean masks made
additive, head dims padded, masks aligned) and which calls it keeps from them is the same here; see `attention.cpp` and
`cuda/sdp_utils.cpp` in aten/src/ATen/native/transformers of pytorch.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .kernel import FLOATS, HALF, MASKS, Abilities, AttentionCall, Kernel

aten = torch.ops.aten

ALIGNMENT = 16
"""Bytes to which the CUDA kernels want every row of q, k and v to be aligned."""


class SdpaMath(Kernel):
    """Plain matrix products and a softmax: anything, anywhere, slowly."""

    name = "sdpa_math"
    abilities = Abilities(
        devices=("cpu", "cuda", "mps", "xpu"),
        dtypes=(*FLOATS, torch.float64),
        max_head_dim=2**16,
        masks=MASKS,
        causal_cross=True,
        mixed_dims=True,
        gradient=True,
    )

    def run(
        self, q_BSHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, mask: Tensor | None, causal: bool, scale: float | None
    ) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q_BSHD, k_BTGD, v_BTGD))
        grouped = q.shape[1] != k.shape[1]
        bias = additive(mask, q)
        out, _ = aten._scaled_dot_product_attention_math(
            q, k, v, bias, 0.0, causal, None, scale=scale, enable_gqa=grouped
        )
        return out.transpose(1, 2)


class SdpaFlash(Kernel):
    """FlashAttention-2 on CUDA; torch's blocked kernel on the CPU, which also takes masks."""

    name = "sdpa_flash"
    returns_lse = True
    on_cpu = Abilities(devices=("cpu",), dtypes=FLOATS, max_head_dim=2**16, masks=MASKS, causal_cross=True)
    # FlashAttention-2 starts the causal order from the last key: equal lengths only.
    abilities = Abilities(devices=("cpu", "cuda"), dtypes=HALF, max_head_dim=256, capability=(8, 0))

    def available(self) -> str | None:
        return self.abilities.capability_refusal() if torch.cuda.is_available() else None

    def refusal(self, call: AttentionCall) -> str | None:
        return (self.on_cpu if call.device == "cpu" else self.abilities).refusal(call)

    def run(
        self, q_BSHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, mask: Tensor | None, causal: bool, scale: float | None
    ) -> Tensor:
        return self._run(q_BSHD, k_BTGD, v_BTGD, mask, causal, scale)[0]

    def run_with_lse(
        self, q_BSHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        return self._run(q_BSHD, k_BTGD, v_BTGD, None, False, scale)

    def _run(
        self, q_BSHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, mask: Tensor | None, causal: bool, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        if q_BSHD.device.type == "cpu":
            # It reads the elements of a head as if they were contiguous.
            q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in heads_first(q_BSHD, k_BTGD, v_BTGD))
            bias = four_dims(additive(mask, q))
            out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, causal, attn_mask=bias, scale=scale
            )
            return out.transpose(1, 2), lse
        scale = _scale(q_BSHD, scale)
        q, k, v = (aligned(pad_last(t, 8)) for t in heads_first(q_BSHD, k_BTGD, v_BTGD))
        out, lse = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]
        return out[..., : v_BTGD.shape[3]].transpose(1, 2), lse


class SdpaEfficient(Kernel):
    """The memory-efficient kernel of xformers, as shipped with torch."""

    name = "sdpa_efficient"
    returns_lse = True
    abilities = Abilities(dtypes=FLOATS, max_head_dim=2**16, masks=MASKS, causal_cross=True, capability=(5, 0))

    def available(self) -> str | None:
        return self.abilities.capability_refusal()

    def run(
        self, q_BSHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, mask: Tensor | None, causal: bool, scale: float | None
    ) -> Tensor:
        return self._run(q_BSHD, k_BTGD, v_BTGD, mask, causal, scale, False)[0]

    def run_with_lse(
        self, q_BSHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        out, lse = self._run(q_BSHD, k_BTGD, v_BTGD, None, False, scale, True)
        return out, lse[..., : q_BSHD.shape[1]]  # the kernel fills its rows up to a multiple of 32

    def _run(
        self,
        q_BSHD: Tensor,
        k_BTGD: Tensor,
        v_BTGD: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float | None,
        lse: bool,
    ) -> tuple[Tensor, Tensor]:
        scale = _scale(q_BSHD, scale)
        q, k, v = (aligned(pad_last(t, 8)) for t in heads_first(q_BSHD, k_BTGD, v_BTGD))
        bias = rows(additive(mask, q), k)
        bias = bias if bias is None else bias.expand(*q.shape[:3], k.shape[2])
        found = aten._scaled_dot_product_efficient_attention(q, k, v, bias, lse, 0.0, causal, scale=scale)
        return found[0][..., : v_BTGD.shape[3]].transpose(1, 2), found[1]


CUDNN = (9, 10)
"""Oldest version of cuDNN: before it, minus infinity in a mask gave wrong rows."""


class SdpaCudnn(Kernel):
    """cuDNN's fused attention; the fastest of torch's own on Hopper."""

    name = "sdpa_cudnn"
    returns_lse = True
    abilities = Abilities(max_head_dim=128, head_dim_multiple=8, masks=MASKS, one_key=False, capability=(8, 0))

    def available(self) -> str | None:
        reason = self.abilities.capability_refusal()
        have = torch.backends.cudnn.version() or 0
        if reason is None and have < CUDNN[0] * 10_000 + CUDNN[1] * 100:
            reason = f"needs cuDNN {CUDNN[0]}.{CUDNN[1]} or newer, not {have // 10_000}.{have // 100 % 100}"
        return reason

    def run(
        self, q_BSHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, mask: Tensor | None, causal: bool, scale: float | None
    ) -> Tensor:
        return self._run(q_BSHD, k_BTGD, v_BTGD, mask, causal, scale, False)[0]

    def run_with_lse(
        self, q_BSHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        out, lse = self._run(q_BSHD, k_BTGD, v_BTGD, None, False, scale, True)
        return out, lse.reshape(lse.shape[:3])  # (B, H, S, 1) since torch 2.9

    def _run(
        self,
        q_BSHD: Tensor,
        k_BTGD: Tensor,
        v_BTGD: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float | None,
        lse: bool,
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (aligned(t) for t in heads_first(q_BSHD, k_BTGD, v_BTGD))
        # With minus infinities, as everywhere. torch itself fills boolean masks with -65504 for cuDNN (up to 2.10 at
        # least), which makes a query that sees no key see all of them: https://github.com/pytorch/pytorch/issues/177842
        bias = rows(additive(mask, q), k)
        found = aten._scaled_dot_product_cudnn_attention(q, k, v, bias, lse, 0.0, causal, False, scale=scale)
        return found[0].transpose(1, 2), found[1]


def heads_first(q_BSHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(B, H, S, D) views; key heads repeated to the number of query heads where there are fewer."""
    q, k, v = (t.transpose(1, 2) for t in (q_BSHD, k_BTGD, v_BTGD))
    if k.shape[1] != q.shape[1]:
        repeat = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    return q, k, v


def additive(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """A mask as what is added to the scores, in q's dtype: zero and minus infinity for True and False."""
    if mask is None or mask.dtype != torch.bool:
        return mask if mask is None else mask.to(q.dtype)
    return torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask.logical_not(), -math.inf)


def four_dims(bias: Tensor | None) -> Tensor | None:
    """The bias with leading dimensions of 1 up to four."""
    return None if bias is None else bias[(None,) * (4 - bias.dim())]


def rows(bias: Tensor | None, k: Tensor) -> Tensor | None:
    """The bias in four dimensions, its rows all T long and aligned to 16 elements as the kernels want them."""
    bias = four_dims(bias)
    if bias is None:
        return None
    T = k.shape[2]
    if T % 16:
        return F.pad(bias.expand(*bias.shape[:3], T), (0, -T % 16))[..., :T]
    if bias.shape[3] != T or bias.stride(3) != 1 or any(stride % 16 for stride in bias.stride()[:3]):
        return bias.expand(*bias.shape[:3], T).contiguous()
    return bias


def pad_last(tensor: Tensor, multiple: int) -> Tensor:
    """The head dim filled up with zeros, which change neither a product nor the part of the output that is kept."""
    missing = -tensor.shape[-1] % multiple
    return F.pad(tensor, (0, missing)) if missing else tensor


def aligned(tensor: Tensor) -> Tensor:
    """`tensor`, or a contiguous copy where its rows do not start at `ALIGNMENT` bytes, or are not contiguous."""
    elements = ALIGNMENT // tensor.element_size()
    # Traced code cannot read the offset (torch 2.11); a compiled graph realigns its inputs itself.
    off = 0 if torch.compiler.is_compiling() else tensor.storage_offset() % elements
    off = off or any(stride % elements for stride in tensor.stride()[:-1])
    return tensor.clone(memory_format=torch.contiguous_format) if off or tensor.stride(-1) != 1 else tensor


def _scale(q: Tensor, scale: float | None) -> float:
    """The scale of the head dim before padding."""
    return scale if scale is not None else 1 / math.sqrt(q.shape[-1])
