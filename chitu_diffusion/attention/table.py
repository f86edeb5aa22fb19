"""The table of kernels. A new kernel is one file and one row here."""

from __future__ import annotations

import functools

from chitu_hooks import PatchError
from chitu_hooks.errors import nearest

from .diffusers_backend import PREFIX, diffusers_backends
from .fa2 import FlashAttention2
from .fa3 import FlashAttention3
from .kernel import Kernel
from .sage import Sage
from .sdpa import SdpaCudnn, SdpaEfficient, SdpaFlash, SdpaMath
from .xformers import Xformers

OURS = (SdpaMath, SdpaEfficient, SdpaFlash, SdpaCudnn, FlashAttention2, FlashAttention3, Xformers, Sage)


@functools.lru_cache(maxsize=1)
def kernels() -> dict[str, Kernel]:
    """Name -> kernel, whether or not it can be used here; diffusers' backends come last, with a prefix."""
    return {kernel.name: kernel for kernel in (*(cls() for cls in OURS), *diffusers_backends())}


def find_kernel(name: str) -> Kernel:
    """The kernel called `name`; a name of diffusers' dispatcher needs its prefix only where it is one of ours too.

    Raises:
        PatchError: there is none; the message has the nearest names.
    """
    table = kernels()
    kernel = table.get(name) or table.get(PREFIX + name)
    if kernel is None:
        raise PatchError(f"no attention kernel {name!r}{nearest(name, ['auto', *table])}")
    return kernel
