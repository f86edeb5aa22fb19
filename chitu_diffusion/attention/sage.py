"""SageAttention: 8-bit queries and keys (https://github.com/thu-ml/SageAttention). Lossy, so `auto` never takes it."""

from __future__ import annotations

import torch
from torch import Tensor

from .kernel import Abilities, Kernel
from .packages import missing


class Sage(Kernel):
    """SageAttention; no mask. It subtracts the mean of the keys, which leaves nothing of a single one. Zhang et al., 2024, https://arxiv.org/abs/2410.02367."""

    name = "sage"
    exactness = "lossy"
    # Version 1.0.6 masks no scores behind the last key: unless the last block of 64 keys is full, they count as zeros.
    abilities = Abilities(head_dims=(64, 96, 128), grouped=False, one_key=False, key_block=64, capability=(8, 0))

    def available(self) -> str | None:
        reason = missing("sageattention", "sageattention") or missing("triton", "triton")
        return self.abilities.capability_refusal() or reason

    def load(self) -> None:
        import sageattention  # noqa: F401  (fails here, by name, and not in the middle of a step)

    def run(
        self, q_BSHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, mask: Tensor | None, causal: bool, scale: float | None
    ) -> Tensor:
        return _attend(q_BSHD, k_BTGD, v_BTGD, causal, scale)


@torch.library.custom_op("chitu::sage_attention", mutates_args=())
def _attend(q_BSHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, causal: bool, scale: float | None) -> Tensor:
    """One opaque operator: torch.compile neither traces the Triton kernels nor sees what they do to K."""
    from sageattention import sageattn

    # Version 1.0.6 subtracts the mean from K in place; the caller's K must survive.
    k = k_BTGD.clone(memory_format=torch.contiguous_format)
    return sageattn(
        q_BSHD.contiguous(), k, v_BTGD.contiguous(), tensor_layout="NHD", is_causal=causal, sm_scale=scale
    ).contiguous()


@_attend.register_fake
def _(q_BSHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, causal: bool, scale: float | None) -> Tensor:
    return torch.empty_like(q_BSHD, memory_format=torch.contiguous_format)
