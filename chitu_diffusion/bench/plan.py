"""What a bench of caches is to do."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from chitu_diffusion.runtime import DiffusionTask

from .cases import Case
from .lab import Item


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a bench is to do."""

    task: DiffusionTask
    """Model, prompts, size, guidance, dtype and device; its steps are those of the cases."""
    seeds: tuple[int, ...]
    cases: tuple[Case, ...]
    output: Path
    batch: int = 1
    """Pictures drawn in one call where a case allows it; timing is always of one picture."""
    repeats: int = 3
    """Timed calls of each case and prompt, after one that is dropped."""
    timed: int = 1
    """Prompts that are timed, from the first."""
    workers: int = 1
    """Processes that draw; timing is always done alone."""
    seconds: float = float("inf")
    """Time to spend: nothing is begun that would not fit."""
    run: int = field(default_factory=time.time_ns)
    """Number of this run: a case that failed in it is tried again in the next one only."""

    @property
    def items(self) -> list[Item]:
        return [(prompt, seed) for prompt in self.task.prompts for seed in self.seeds]


def baseline_case(steps: int) -> Case:
    return Case(kind="baseline", use="", steps=steps, family="baseline")
