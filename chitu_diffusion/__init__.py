"""Chitu: make a loaded diffusers pipeline faster in place, and take it off again without a trace.

::

    from chitu_diffusion import Static, patch

    with patch(pipe, cache=Static(steps=(0, 1, 2, 4, 8, 13, 20, 27)), attention="sdpa_flash") as handle:
        image = pipe("a red apple on a blue background").images[0]
    print(handle.report())
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chitu_hooks import ChituError, Feature, HookMap, Stack

    from .api import Handle, patch
    from .flexcache import (
        PAB,
        BlockDance,
        Cubic,
        EasyCache,
        FBCache,
        MagCache,
        MeanCache,
        Planned,
        Static,
        TaylorSeer,
        TeaCache,
    )
    from .parallel import Parallel

__all__ = [
    "PAB",
    "BlockDance",
    "ChituError",
    "Cubic",
    "EasyCache",
    "FBCache",
    "Feature",
    "Handle",
    "HookMap",
    "MagCache",
    "MeanCache",
    "Parallel",
    "Planned",
    "Stack",
    "Static",
    "TaylorSeer",
    "TeaCache",
    "patch",
]
__version__ = "0.1.0.dev0"

# Each name is imported when it is first asked for: the command line is in this package too, and has to show its help at
# once and to describe an environment in which diffusers cannot be imported.
_HOMES = {
    **dict.fromkeys(("ChituError", "Feature", "HookMap", "Stack"), "chitu_hooks"),
    **dict.fromkeys(
        (
            "BlockDance",
            "Cubic",
            "EasyCache",
            "FBCache",
            "MagCache",
            "MeanCache",
            "PAB",
            "Planned",
            "Static",
            "TaylorSeer",
            "TeaCache",
        ),
        "chitu_diffusion.flexcache",
    ),
    **dict.fromkeys(("Handle", "patch"), "chitu_diffusion.api"),
    "Parallel": "chitu_diffusion.parallel",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
