"""Every backend of diffusers' own dispatcher, under its name there: `native`, `flash`, `_native_cudnn`, …"""

from __future__ import annotations

from typing import Any

from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _AttentionBackendRegistry,
    _check_attention_backend_requirements,
    dispatch_attention_fn,
)
from torch import Tensor

from .kernel import FLOATS, HALF, Abilities, Kernel

PREFIX = "diffusers:"


class DiffusersBackend(Kernel):
    """One backend of `diffusers.models.attention_dispatch`, called for this pipe only.

    Args:
        backend: the member of `AttentionBackendName`.
    """

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.name = f"{PREFIX}{backend.value}"
        self.exactness = "lossy" if "sage" in backend.value else "close"
        native = backend.value in ("native", "_native_math")
        # The dispatcher drops arguments that a backend does not list, and most flash and sage backends raise on a mask.
        takes_mask = "attn_mask" in self._argument_names() and not _flashlike(backend.value)
        self.abilities = Abilities(
            devices=("cpu", "cuda", "mps", "xpu") if native else ("cuda",),
            dtypes=FLOATS if "native" in backend.value or backend.value in ("flex", "xformers") else HALF,
            max_head_dim=2**16 if native else 256,
            mask=takes_mask,
            grouped="enable_gqa" in self._argument_names(),
        )

    def _argument_names(self) -> set[str]:
        return _AttentionBackendRegistry._supported_arg_names.get(self.backend, set())

    def available(self) -> str | None:
        if self.backend not in _AttentionBackendRegistry._backends:
            return "is not registered in the installed diffusers"
        try:
            _check_attention_backend_requirements(self.backend)
        except (RuntimeError, ImportError, OSError) as error:
            return str(error).rstrip(".")
        return None if "cpu" in self.abilities.devices else self.abilities.capability_refusal()

    def run(
        self, q_BSHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, mask: Tensor | None, causal: bool, scale: float | None
    ) -> Tensor:
        grouped = q_BSHD.shape[2] != k_BTGD.shape[2]
        return dispatch_attention_fn(
            q_BSHD, k_BTGD, v_BTGD, mask, 0.0, causal, scale, grouped, None, backend=self.backend
        )


def _flashlike(name: str) -> bool:
    return ("flash" in name or "sage" in name or "aiter" in name or name == "_native_xla") and "varlen" not in name


def diffusers_backends() -> list[Kernel]:
    """One kernel for each backend name that the installed diffusers knows."""
    return [DiffusersBackend(backend) for backend in AttentionBackendName]
