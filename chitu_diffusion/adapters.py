"""The registry of hook maps: every file of the adapters folder, found by path.

In the wheel the folder is `chitu_diffusion/_adapters`, in a checkout it is `adapters` beside the package; the import
name `adapters` belongs to another distribution and is never used.
"""

from __future__ import annotations

import functools
from pathlib import Path

from chitu_hooks import HookMap, load_hook_map


def adapters_folder() -> Path:
    """Where the hook maps are."""
    package = Path(__file__).parent
    shipped = package / "_adapters"
    return shipped if shipped.is_dir() else package.parent / "adapters"


@functools.lru_cache(maxsize=1)
def registry() -> tuple[HookMap, ...]:
    """Every hook map of the adapters folder, by file name."""
    return tuple(load_hook_map(path) for path in sorted(adapters_folder().glob("[!_]*.py")))
