"""FlashAttention-2, from the package flash-attn (https://github.com/Dao-AILab/flash-attention)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .kernel import HALF, Abilities, Kernel
from .packages import installed, missing, version
from .sdpa import aligned

OLDEST = (2, 6)
"""First version whose forward is an operator that torch.compile knows."""


class FlashAttention2(Kernel):
    """FlashAttention-2: no mask, head dims up to 256. Tri Dao, 2023, https://arxiv.org/abs/2307.08691."""

    name = "fa2"
    returns_lse = True
    abilities = Abilities(dtypes=HALF, max_head_dim=256, capability=(8, 0))
    attend: Callable[..., Any]

    def available(self) -> str | None:
        reason = missing("flash-attn", "flash_attn") or missing("flash-attn", "flash_attn_2_cuda")
        if reason is not None and installed("flash-attn-4"):
            reason += "; flash-attn-4 has a module of that name, without the kernels of version 2"
        if reason is None and version("flash-attn") < OLDEST:
            reason = f"needs flash-attn {'.'.join(map(str, OLDEST))} or newer"
        return self.abilities.capability_refusal() or reason

    def load(self) -> None:
        from flash_attn import flash_attn_func

        self.attend = flash_attn_func

    def run(
        self, q_BSHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, mask: Tensor | None, causal: bool, scale: float | None
    ) -> Tensor:
        q, k, v = (aligned(t) for t in (q_BSHD, k_BTGD, v_BTGD))
        return self.attend(q, k, v, softmax_scale=scale, causal=causal)

    def run_with_lse(
        self, q_BSHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (aligned(t) for t in (q_BSHD, k_BTGD, v_BTGD))
        out, lse, _ = self.attend(q, k, v, softmax_scale=scale, return_attn_probs=True)
        return out, lse
