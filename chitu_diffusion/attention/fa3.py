"""FlashAttention-3 for Hopper, from the package fa3-fwd, or from flash_attn_interface where that is built from source."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .kernel import HALF, Abilities, Kernel

HOPPER = Abilities(
    dtypes=(torch.bfloat16,), max_head_dim=256, head_dim_multiple=8, capability=(9, 0), capability_below=(10, 0)
)
MODULES = {
    # The wheel of fa3-fwd 0.0.3 is built without float16.
    "fa3_fwd_interface": HOPPER,
    "flash_attn_interface": Abilities(**{**vars(HOPPER), "dtypes": HALF}),
}


class FlashAttention3(Kernel):
    """FlashAttention-3: Hopper only, no mask. Shah et al., 2024, https://arxiv.org/abs/2407.08608."""

    name = "fa3"
    returns_lse = True
    abilities = HOPPER
    attend: Callable[..., Any]

    def available(self) -> str | None:
        reason = None
        if _module() is None:
            reason = "needs the package fa3-fwd (pip install fa3-fwd), or flash_attn_interface built from source"
        return self.abilities.capability_refusal() or reason

    def load(self) -> None:
        name = _module()
        assert name is not None, "available() said so"
        self.abilities = MODULES[name]
        self.attend = importlib.import_module(name).flash_attn_func

    def run(
        self, q_BSHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, mask: Tensor | None, causal: bool, scale: float | None
    ) -> Tensor:
        out = self.attend(q_BSHD, k_BTGD, v_BTGD, softmax_scale=scale, causal=causal)
        return out[0] if isinstance(out, tuple) else out


def _module() -> str | None:
    return next((name for name in MODULES if importlib.util.find_spec(name) is not None), None)
