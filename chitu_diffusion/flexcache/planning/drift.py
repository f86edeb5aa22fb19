"""How far velocities move when the latent before them moves, measured: in runs of plans, against the full runs they follow.

At a computed step of a plan the latent is off by what the forecasts before it missed, and the velocity is off by what that
does to it. Both are known where the full run is, and the ratio of their lengths is the response of that step. The direction
matters, it is not that of noise: so errors of real forecasts are measured, not noise that is added.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch

from chitu_hooks import Feature, Generation, Order, StepCall

from .combine import response
from .gram import Array, Tables

HELD = 4 << 30
"""Bytes of whole runs on the host from which on no further one is kept; the first is, whatever its size."""
LEAST_MOVED = 1e-5
"""Of a latent's length; what moved it less is rounding. In short dtypes, half of their precision."""
FARTHEST = 100.0
"""Most that a response is above or below the rule, in times."""

Sample = tuple[int, tuple[float, ...]]
"""A position, and the response there of each picture of the batch; nan where its latent did not move."""
Steps = list[tuple[torch.Tensor, torch.Tensor]]
"""Of each position of a run the latent before it and the guided prediction, on the host."""


class WholeRuns(Feature):
    """Keeps latents and guided predictions of the first runs on the host, in the dtypes of the pipeline.

    Args:
        most: runs to keep, at most; fewer if they would take more than `HELD` bytes.
    """

    name = "whole runs"
    order = Order.CLOCK

    def __init__(self, most: int) -> None:
        self.most = most
        self.runs: list[Steps] = []
        self._bytes = 0

    def begin(self, generation: Generation) -> None:
        kept = len(self.runs)
        room = not kept or self._bytes * (kept + 1) <= HELD * kept
        generation.memory(self).seen = [] if kept < self.most and room else None

    def step_in(self, step: StepCall) -> None:
        seen = step.generation.memory(self).seen
        if seen is not None:
            latent, velocity = (part.detach().to("cpu", copy=True) for part in (step.sample, step.model_output))
            seen.append((latent, velocity))

    def end(self, generation: Generation) -> None:
        seen = generation.memory(self).seen
        if seen:
            self.runs.append(seen)
            self._bytes += sum(part.nbytes for pair in seen for part in pair)


class Drift(Feature):
    """Follows a run of a plan and tells how far each latent and each velocity is from those of the whole run.

    Args:
        whole: the run with the same prompt and noise.
    """

    name = "drift"
    order = Order.CLOCK  # sees what the model predicted, before the plan's weights replace it

    def __init__(self, whole: Steps) -> None:
        self.whole = whole
        self.samples: list[Sample] = []

    def step_in(self, step: StepCall) -> None:
        if step.step.index < len(self.whole):
            self.samples.append((step.step.position, ratios(self.whole[step.step.index], step)))

    def at(self, computed: Collection[int]) -> list[Sample]:
        """Of these positions; elsewhere the model predicted nothing."""
        return [sample for sample in self.samples if sample[0] in computed]


def ratios(whole: tuple[torch.Tensor, torch.Tensor], step: StepCall) -> tuple[float, ...]:
    """Of each picture, how far the prediction moved over how far the latent did; nan where that is rounding."""
    pairs = zip(whole, (step.sample, step.model_output))
    moved, answered = ((own.detach().cpu().float() - full.float()).flatten(1).norm(dim=1) for full, own in pairs)
    precision = max(torch.finfo(part.dtype).eps for part in whole)
    least = max(LEAST_MOVED, precision / 2) * whole[0].float().flatten(1).norm(dim=1)
    return tuple(torch.where((moved > least) & (answered > 0), answered / moved, torch.nan).tolist())


def responses(tables: Tables, runs: Sequence[Sequence[Sample]]) -> Array | None:
    """(R, N) responses of R pictures, from what was found in the runs of each call; None where nothing moved.

    A picture's table is the rule times a factor: the geometric mean of what was found at a position, between positions
    interpolated in its logarithm, and beyond them that of the last. A picture of which nothing is known has the rule.
    """
    rule = response(tables)
    rows = [_factors(samples, picture, rule) for samples in runs for picture in range(len(samples[0][1]))]
    if all(row is None for row in rows):
        return None
    return rule * np.stack([np.ones_like(rule) if row is None else row for row in rows])


def _factors(samples: Sequence[Sample], picture: int, rule: Array) -> Array | None:
    """(N) times the rule, for one picture of the batch; None where nothing was found."""
    found: dict[int, list[float]] = {}
    for position, ratio in samples:
        if np.isfinite(ratio[picture]):
            found.setdefault(position, []).append(np.log(ratio[picture] / rule[position]))
    if not found:
        return None
    places = sorted(found)
    logs = np.interp(np.arange(len(rule)), places, [np.mean(found[place]) for place in places])
    return np.exp(np.clip(logs, -np.log(FARTHEST), np.log(FARTHEST)))
