"""What a forecast is made of: the last computed predictions, and weights that are known before the run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

MEMORY = 3
"""Computed predictions that a forecast is made of, at most."""


Kept = dict[int, torch.Tensor]
"""Position -> the prediction computed there, in float32; the last ones, oldest first."""


def keep(kept: Kept, position: int, prediction: torch.Tensor) -> None:
    """Add the prediction of one more computed position."""
    kept[position] = prediction
    if len(kept) > MEMORY:
        del kept[next(iter(kept))]


def summed(kept: Kept, pairs: Sequence[tuple[int, float]]) -> torch.Tensor:
    """The sum of the predictions at some positions, each with its weight."""
    return combined([kept[position] for position, _ in pairs], [weight for _, weight in pairs])


def combined(tensors: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """``sum(weight * tensor)`` in one kernel a tensor, or one for two whose weights add up to 1; a single one as it is.

    Args:
        tensors: of one shape, in float32.
        weights: as many numbers.
    """
    first, *others = tensors
    if not others:
        return first if weights[0] == 1.0 else first * weights[0]
    if len(others) == 1 and abs(sum(weights) - 1.0) < 1e-9:
        return torch.lerp(others[0], first, weights[0])
    result = first * weights[0]
    for tensor, weight in zip(others, weights[1:], strict=True):
        result.add_(tensor, alpha=weight)
    return result


def innovation(found: torch.Tensor, forecast: torch.Tensor) -> torch.Tensor:
    """(2, B): the squared length of what the forecast missed, and that of what was found, of each sample; on the device."""
    missed = torch.linalg.vector_norm((found - forecast).flatten(1), dim=1)
    return torch.stack([missed, torch.linalg.vector_norm(found.flatten(1), dim=1)]).square()


Innovation = tuple[tuple[int, ...], int, Any]
"""The computed positions that a forecast was made from, the newest first; the one that it was for; what `innovation` gave."""


def read(innovations: Sequence[Innovation]) -> list[Innovation]:
    """The same with numbers in place of tensors; the device is waited for once."""
    numbers = torch.stack([sums for *_, sums in innovations]).tolist() if innovations else []
    return [(history, position, sums) for (history, position, _), sums in zip(innovations, numbers)]


def relative(sums: Sequence[Sequence[float]]) -> list[float]:
    """Of each sample, from what `innovation` returned: what the forecast missed over the length of what was found."""
    return [math.sqrt(missed / length) if length else math.nan for missed, length in zip(*sums)]
