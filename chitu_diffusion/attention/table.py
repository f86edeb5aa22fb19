"""The table of kernels. A new kernel is one file and one row here."""

from __future__ import annotations

import functools

from .kernel import Kernel
from .sdpa import SdpaCudnn, SdpaEfficient, SdpaFlash, SdpaMath


@functools.lru_cache(maxsize=1)
def kernels() -> dict[str, Kernel]:
    """Name -> kernel, whether or not it can be used here."""
    return {kernel.name: kernel for kernel in (SdpaMath(), SdpaEfficient(), SdpaFlash(), SdpaCudnn())}
