"""FlashAttention-2, from the package flash-attn (https://github.com/Dao-AILab/flash-attention)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .kernel import HALF, Abilities, Kernel
from .packages import missing, version


class FlashAttention2(Kernel):
    """FlashAttention-2: no mask, head dims up to 256. Tri Dao, 2023, https://arxiv.org/abs/2307.08691."""

    name = "fa2"
    returns_lse = True
    abilities = Abilities(dtypes=HALF, max_head_dim=256, capability=(8, 0))
    attend: Callable[..., Any]

    def available(self) -> str | None:
        # flash-attn-4 ships a package of the same name without the kernels of version 2.
        reason = missing("flash-attn", "flash_attn") or missing("flash-attn", "flash_attn_2_cuda")
        if reason is None and version("flash-attn") < (2, 6):
            reason = "needs flash-attn 2.6 or newer"
        return self.abilities.capability_refusal() or reason

    def load(self) -> None:
        from flash_attn import flash_attn_func

        self.attend = flash_attn_func

    def run(
        self, q_BSHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, mask: Tensor | None, causal: bool, scale: float | None
    ) -> Tensor:
        return self.attend(q_BSHD, k_BTGD, v_BTGD, softmax_scale=scale, causal=causal)
