"""FlashAttention-3 for Hopper, from the package fa3-fwd, or flash_attn_interface built from source."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .kernel import HALF, Abilities, Kernel
from .packages import find
from .sdpa import aligned

HOPPER = Abilities(
    dtypes=(torch.bfloat16,), max_head_dim=256, head_dim_multiple=8, capability=(9, 0), capability_below=(10, 0)
)
MODULES = {
    # The wheel of fa3-fwd 0.0.3 is built without float16.
    "fa3_fwd_interface": HOPPER,
    "flash_attn_interface": dataclasses.replace(HOPPER, dtypes=HALF),
}


class FlashAttention3(Kernel):
    """FlashAttention-3: Hopper only, no mask. Shah et al., 2024, https://arxiv.org/abs/2407.08608."""

    name = "fa3"
    returns_lse = True
    abilities = HOPPER
    attend: Callable[..., Any]
    operator: Callable[..., Any] | None = None
    """The C++ operator of fa3-fwd, without its Python wrappers: uncompiled, they cost more than the launch."""
    traceable: Callable[..., Any] | None = None
    """The Python operator around it, which torch.compile knows the output's shape of."""

    def available(self) -> str | None:
        reason = None
        if _module() is None:
            reason = "needs the package fa3-fwd (pip install fa3-fwd), or flash_attn_interface built from source"
        return self.abilities.capability_refusal() or reason

    def load(self) -> None:
        name = _module()
        if name is None:
            raise ImportError("neither fa3_fwd_interface nor flash_attn_interface is installed")
        self.attend = importlib.import_module(name).flash_attn_func
        self.abilities = MODULES[name]
        if name == "fa3_fwd_interface":
            self.operator = torch.ops.fa3_fwd.fwd
            self.traceable = torch.ops.fa3_fwd._flash_attn_forward

    def run(
        self, q_BSHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, mask: Tensor | None, causal: bool, scale: float | None
    ) -> Tensor:
        if self.operator is None:
            q, k, v = (aligned(t) for t in (q_BSHD, k_BTGD, v_BTGD))
            out = self.attend(q, k, v, softmax_scale=scale, causal=causal)
            return out[0] if isinstance(out, tuple) else out
        return self._run(q_BSHD, k_BTGD, v_BTGD, causal, scale)[0]

    def run_with_lse(
        self, q_BSHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        return self._run(q_BSHD, k_BTGD, v_BTGD, False, scale)

    def _run(
        self, q_BSHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, causal: bool, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (aligned(t) for t in (q_BSHD, k_BTGD, v_BTGD))
        if scale is None:
            scale = q.shape[-1] ** -0.5
        if self.operator is None or self.traceable is None:
            return self.attend(q, k, v, softmax_scale=scale, causal=causal, return_attn_probs=True)[:2]
        # One split, as the wrapper has it: the result then does not depend on the number of multiprocessors.
        if torch.compiler.is_compiling():
            return self.traceable(q, k, v, softmax_scale=scale, causal=causal, num_splits=1)[:2]
        return self.operator(q, k, v, softmax_scale=scale, is_causal=causal, num_splits=1)[:2]


def _module() -> str | None:
    return next((name for name in MODULES if find(name) is not None), None)
