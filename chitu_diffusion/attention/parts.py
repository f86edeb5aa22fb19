"""Attention on parts of the keys where no kernel is named: torch's own, which gives the log-sum-exp."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from chitu_hooks import AttentionContext, Feature, GenerationError, Order

from .kernel import HALF
from .sdpa import SdpaEfficient, SdpaFlash

FLASH, EFFICIENT = SdpaFlash(), SdpaEfficient()


class TorchInParts(Feature):
    """Stands behind a choice of kernels that leaves some calls to torch. Whole calls stay as they are."""

    name = "attention in parts"
    order = Order.KERNEL

    def attention_with_lse(
        self, q_BSHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, ctx: AttentionContext
    ) -> tuple[Tensor, Tensor]:
        """FlashAttention where it takes the dtype, else the memory-efficient kernel.

        Raises:
            GenerationError: the user chose a backend in diffusers, whose dispatcher gives no log-sum-exp.
        """
        if ctx.backend is not None:
            raise GenerationError(
                f"{ctx.layer}: the backend set in diffusers gives no log-sum-exp, so attention cannot be put together from "
                "parts; reset_attention_backend(), name a kernel, or use no ring"
            )
        kernel = FLASH if q_BSHD.device.type == "cpu" or q_BSHD.dtype in HALF else EFFICIENT
        return kernel.run_with_lse(q_BSHD, k_BTHD, v_BTHD, ctx.scale)

    def report(self) -> dict[str, Any]:
        return {"kernel": "torch's own"}
