"""Pieces of work that are drawn by themselves: a part of a baseline's pictures, or a case."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .quality import Drawn


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Some pictures of a baseline, or all of a case."""

    steps: int
    """Scheduler steps of the baseline."""
    batch: int
    """Pictures a call."""
    first: int = 0
    count: int
    """Pictures, from number `first`."""
    case: int | None = None
    """Number of the case in the plan; None for a baseline."""

    @property
    def work(self) -> int:
        """Scheduler steps of single pictures."""
        return self.steps * self.count

    @property
    def baseline(self) -> tuple[int, int]:
        """Which pictures it is part of, or is compared with."""
        return self.steps, self.batch


def parts_of(steps: int, batch: int, pictures: int, among: int) -> list[Piece]:
    """A baseline's pictures in at most `among` parts that are drawn in the very calls in which all of them would be."""
    calls = math.ceil(pictures / batch)
    size = math.ceil(calls / among) * batch
    return [
        Piece(steps=steps, batch=batch, first=first, count=min(size, pictures - first))
        for first in range(0, pictures, size)
    ]


def joined(parts: Sequence[Drawn]) -> Drawn:
    """Parts, in order, as what was drawn at once."""
    latents = [part.latents for part in parts if part.latents is not None]
    pictures = torch.cat([part.pictures for part in parts])
    return Drawn(pictures, torch.cat(latents) if len(latents) == len(parts) else None)


def took_together(parts: Sequence[tuple[Piece, dict[str, Any]]]) -> dict[str, Any]:
    """What `Lab.draw` says of all pictures, from what it said of parts: FLOPs a picture, calls a generation, notes."""
    took = [one for _, one in parts]
    unknown = [one["flops"] for one in took if not isinstance(one["flops"], int)]
    pictures = [piece.count for piece, _ in parts]
    generations = [math.ceil(piece.count / piece.batch) for piece, _ in parts]
    kinds = {branch: sorted({k for one in took for k in one["calls"].get(branch, {})}) for branch in took[0]["calls"]}
    return {
        "flops": unknown[0] if unknown else round(_mean([one["flops"] for one in took], pictures)),
        "calls": {
            branch: {k: round(_mean([one["calls"][branch].get(k, 0) for one in took], generations), 2) for k in names}
            for branch, names in kinds.items()
        },
        "notes": sorted({note for one in took for note in one["notes"]}),
    }


def _mean(values: Sequence[float], weights: Sequence[int]) -> float:
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
