"""Every backend of diffusers' own dispatcher, under its name there: `native`, `flash`, `_native_cudnn`, …"""

from __future__ import annotations

import dataclasses
from typing import Any

from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _AttentionBackendRegistry,
    _check_attention_backend_requirements,
    _maybe_download_kernel_for_backend,
    dispatch_attention_fn,
)
from torch import Tensor

from .kernel import FLOATS, KEY, MASKS, Abilities, Kernel
from .sdpa import SdpaCudnn, SdpaEfficient, SdpaFlash, SdpaMath, additive, aligned, four_dims

PREFIX = "diffusers:"

# What each can really take: its own code raises on some of the rest, and on some of it computes something else.
FLASH = Abilities(grouped=False)
SAGE = Abilities(head_dims=(64, 96, 128), grouped=False)
ABILITIES: dict[str, Abilities] = {
    # torch 2.13 reads a float32 mask as float64 there, on the CPU, and computes nonsense.
    "native": dataclasses.replace(SdpaMath.abilities, dtypes=FLOATS),
    "_native_math": SdpaMath.abilities,
    "_native_efficient": dataclasses.replace(SdpaEfficient.abilities, grouped=False),
    "_native_flash": dataclasses.replace(SdpaFlash.abilities, devices=("cuda",), grouped=False),
    "_native_cudnn": dataclasses.replace(SdpaCudnn.abilities, grouped=False),
    "_native_npu": Abilities(devices=("npu",), causal=False, grouped=False),
    "_native_xla": Abilities(devices=("xla",), grouped=False),
    # It forgets causal order where there is no mask.
    "flex": Abilities(dtypes=FLOATS, masks=MASKS, causal=False),
    # It adds boolean masks of four dimensions to the scores as ones and zeros.
    "xformers": Abilities(dtypes=FLOATS, head_dim_multiple=8, causal=False),
    **dict.fromkeys(("flash", "flash_hub", "_flash_3", "_flash_3_hub", "flash_4_hub", "aiter_fa2_hub"), FLASH),
    # They reduce any mask to one of the keys, and take that in packed form.
    **dict.fromkeys(
        ("flash_varlen", "flash_varlen_hub", "_flash_varlen_3", "_flash_3_varlen_hub"),
        dataclasses.replace(FLASH, masks=(KEY,)),
    ),
    "sage_varlen": dataclasses.replace(SAGE, masks=(KEY,)),
}
MADE_ADDITIVE = ("native", "_native_cudnn", "_native_efficient", "flex")
"""Backends that get every mask as an additive one in the dtype of the queries: torch makes a boolean one wrong for cuDNN,
see `SdpaCudnn`, and takes a float32 one beside half precision for it and computes nonsense; diffusers takes the first
head's for flex."""
AS_IT_IS = ("_native_math",)
"""Backends that get the call just as the layer made it; the others need aligned rows, and masks of four dimensions: where
rows are not aligned, torch 2.11 hands them to cuDNN all the same, and the result is wrong."""


class DiffusersBackend(Kernel):
    """One backend of `diffusers.models.attention_dispatch`, called for this pipe only.

    The ``_native_…`` ones switch process-wide flags of torch while they run, as they do in diffusers; the ``sdpa_…``
    kernels do not.

    Args:
        backend: the member of `AttentionBackendName`.
    """

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.name = f"{PREFIX}{backend.value}"
        self.exactness = "lossy" if "sage" in backend.value else "close"
        self.abilities = ABILITIES.get(backend.value, SAGE if "sage" in backend.value else FLASH)
        self.makes_additive = backend.value in MADE_ADDITIVE
        self.prepares = backend.value not in AS_IT_IS

    def available(self) -> str | None:
        if self.backend not in _AttentionBackendRegistry._backends:
            return "is not registered in the installed diffusers"
        try:
            _check_attention_backend_requirements(self.backend)
        except (RuntimeError, ImportError, OSError) as error:
            return str(error).rstrip(".")
        return self.abilities.capability_refusal() if "cuda" in self.abilities.devices[:1] else self._elsewhere()

    def _elsewhere(self) -> str | None:
        return None if "cpu" in self.abilities.devices else f"needs a device of type {self.abilities.devices[0]}"

    def load(self) -> None:
        """Fetch a kernel that lives on the Hub, as ``set_attention_backend`` does.

        Raises:
            ImportError, OSError, ValueError: it cannot be fetched or used.
        """
        _maybe_download_kernel_for_backend(self.backend)

    def run(
        self, q_BSHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, mask: Tensor | None, causal: bool, scale: float | None
    ) -> Tensor:
        if self.makes_additive:
            mask = additive(mask, q_BSHD)
        if self.prepares:
            q_BSHD, k_BTGD, v_BTGD, mask = aligned(q_BSHD), aligned(k_BTGD), aligned(v_BTGD), four_dims(mask)
        grouped = q_BSHD.shape[2] != k_BTGD.shape[2]
        return dispatch_attention_fn(
            q_BSHD, k_BTGD, v_BTGD, mask, 0.0, causal, scale, grouped, None, backend=self.backend
        )


def diffusers_backends() -> list[Kernel]:
    """One kernel for each backend name that the installed diffusers knows."""
    return [DiffusersBackend(backend) for backend in AttentionBackendName]
