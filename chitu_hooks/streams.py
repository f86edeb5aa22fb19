"""Streams by role: in the form in which the blocks of a stack return them, and what a stack added to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .errors import HookMapError
from .state import Streams

if TYPE_CHECKING:
    from .sites import StackSite


def unpack(result: Any, stack: StackSite) -> Streams:
    """Role -> tensor of what a block returned.

    Raises:
        HookMapError: that has another form than the map says, so that what `pack` makes could not stand for it.
    """
    roles = stack.returns or ()
    if isinstance(result, torch.Tensor) and len(roles) == 1:
        return {roles[0]: result}
    if isinstance(result, (tuple, list)) and len(result) == len(roles) > 1:
        return dict(zip(roles, result))
    form = f"{len(result)} values" if isinstance(result, (tuple, list)) else f"one {type(result).__name__}"
    raise HookMapError(
        f"{stack.denoiser.name}.{stack.path}: a block returned {form}, and the hook map says returns={roles}; correct the map"
    )


def pack(outputs: Streams, stack: StackSite) -> Any:
    """The streams in the form in which the stack's blocks return them."""
    roles = stack.returns or ()
    return outputs.get(roles[0]) if len(roles) == 1 else tuple(outputs.get(role) for role in roles)


def residual(entry: Streams, outputs: Streams) -> dict[str, torch.Tensor | None]:
    """Role -> exit minus entry; None for a stream that the last block does not return."""
    return {
        role: None if out is None or entry.get(role) is None else out - entry[role] for role, out in outputs.items()
    }


def cloned(streams: Streams) -> Streams:
    """Role -> a copy, for whoever may write into it; None stays."""
    return {role: tensor.clone() if isinstance(tensor, torch.Tensor) else tensor for role, tensor in streams.items()}
