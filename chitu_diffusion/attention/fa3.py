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


OPERATORS = torch.library.Library("chitu", "FRAGMENT")
OPERATORS.define("flash_attention_3(Tensor q, Tensor k, Tensor v, float scale, bool causal) -> (Tensor, Tensor)")
"""For torch.compile, in place of the package's own Python operator: that one goes through three layers of Python with 34
arguments each and makes two empty tensors on the device. An operator of the same form took the host 35 µs, this form 11."""


def _flash_attention_3(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    # One split, as the package's wrapper has it: the result then does not depend on the number of multiprocessors.
    return torch.ops.fa3_fwd.fwd.default(q, k, v, softmax_scale=scale, is_causal=causal, num_splits=1)[:2]


OPERATORS.impl("flash_attention_3", _flash_attention_3, "CUDA")


@torch.library.register_fake("chitu::flash_attention_3", lib=OPERATORS)
def _(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    B, S, H, _ = q.shape
    return q.new_empty((B, S, H, v.shape[3])), q.new_empty((B, H, S), dtype=torch.float32)


class FlashAttention3(Kernel):
    """FlashAttention-3: Hopper only, no mask. Shah et al., 2024, https://arxiv.org/abs/2407.08608."""

    name = "fa3"
    returns_lse = True
    abilities = HOPPER
    attend: Callable[..., Any]
    has_operator = False
    """The C++ operator of fa3-fwd is there, which is called without the package's Python wrappers."""

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
        self.has_operator = name == "fa3_fwd_interface"

    def run(
        self, q_BSHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, mask: Tensor | None, causal: bool, scale: float | None
    ) -> Tensor:
        if not self.has_operator:
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
        if not self.has_operator:
            return self.attend(q, k, v, softmax_scale=scale, causal=causal, return_attn_probs=True)[:2]
        if torch.compiler.is_compiling():
            return torch.ops.chitu.flash_attention_3(q, k, v, scale, causal)
        return _flash_attention_3(q, k, v, scale, causal)


def _module() -> str | None:
    return next((name for name in MODULES if find(name) is not None), None)
