"""Distances between what two steps computed, per sample, as sums that ranks can add up before they divide."""

from __future__ import annotations

from typing import Any

import torch

from chitu_hooks import Streams


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors of a sample: one with the batch in front, or a list of one a sample, which get a batch of one."""
    return [value] if isinstance(value, torch.Tensor) else [tensor.unsqueeze(0) for tensor in value]


def copied(value: Any) -> Any:
    """A copy, since a pipeline may go on to write into its tensors."""
    return value.clone() if isinstance(value, torch.Tensor) else [tensor.clone() for tensor in value]


def norm_l1(value: Any) -> torch.Tensor:
    """Sum of absolute values of each sample, (B,), float32."""
    return _joined([_sums(tensor) for tensor in tensors(value)])


def distance_l1(new: Any, old: Any) -> torch.Tensor:
    """Sum of absolute differences of each sample, (B,), float32."""
    pairs = zip(tensors(new), tensors(old), strict=True)
    return _joined([_sums(a - b) for a, b in pairs])


def _sums(tensor: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(tensor.flatten(1), 1, dim=1, dtype=torch.float32)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def relative_l1(new: Any, old: Any) -> torch.Tensor:
    """(2, B): the difference of each sample and, to divide it by, the size of the old one."""
    return torch.stack([distance_l1(new, old), norm_l1(old)])


def alike(one: Any, other: Any) -> bool:
    """Whether two samples have the same shapes."""
    if one is None or other is None:
        return False
    return [t.shape for t in tensors(one)] == [t.shape for t in tensors(other)]


PICTURE = ("image", "joint", "hidden_states", "x", "gen_seq")
"""Roles of the stream that carries the picture, best first; an inferred map knows argument names only."""


def main_stream(streams: Streams) -> torch.Tensor:
    """The stream that carries the picture, or the first that is there; text hardly changes from step to step."""
    for role in PICTURE:
        if streams.get(role) is not None:
            return streams[role]
    return next(tensor for tensor in streams.values() if tensor is not None)
