"""How copies and pickles of hooked objects come out unhooked."""

from __future__ import annotations

import copyreg
from typing import Any


def unhooked_reduce(self: Any, protocol: Any, base: type) -> Any:
    """`__reduce_ex__` of a hooked object: the copy is of class `base` and carries no mark of ours."""
    parts = list(base.__reduce_ex__(self, protocol))  # type: ignore[call-arg]
    parts[1] = tuple(base if argument is type(self) else argument for argument in parts[1])
    if parts[0] is copyreg.__newobj__:  # type: ignore[attr-defined]  # pickle takes it for objects of that very class only
        parts[0] = new_object
    if len(parts) > 2 and isinstance(parts[2], dict):
        parts[2] = {key: value for key, value in parts[2].items() if not key.startswith("_chitu_")}
    return tuple(parts)


def new_object(cls: type, *args: Any) -> Any:
    """An instance of `cls`, not initialised: how a copy of a hooked object begins."""
    return cls.__new__(cls, *args)
