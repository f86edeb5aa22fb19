"""Recording whole runs for the planned cache: of the guided predictions only their inner products are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from chitu_hooks import Feature, Generation, HookMap, Order, Refusal, RefusedError, Sites, StepCall

from ..strategy.checks import stochastic, stochastic_call
from .grid import has_noise_levels
from .key import Key, key_of

CHUNK = 1 << 18
"""Elements of each velocity that are multiplied at a time, in 64-bit floats."""


@dataclass(frozen=True)
class Run:
    """One run, every step computed."""

    key: Key
    gram: np.ndarray
    """(B, N, N) float64: of each sample, the mean products of the elements of its predictions at two positions."""


class Velocities(Feature):
    """Keeps the guided prediction of every position of one run at a time, on the host, and then their products.

    The two predictions of an order-2 step are averaged: for Heun's method that is the velocity of the whole step.
    """

    name = "velocities"
    order = Order.CLOCK

    def __init__(self) -> None:
        self.runs: list[Run] = []

    def bind(self, sites: Sites, hook_map: HookMap) -> Refusal | None:
        scheduler = getattr(sites.pipe, "scheduler", None)
        noisy = stochastic(scheduler)
        if noisy is not None:
            return Refusal(noisy, "calibrate with a scheduler that adds no noise")
        if scheduler is None or not has_noise_levels(scheduler):
            what = "the pipeline has no scheduler" if scheduler is None else f"{type(scheduler).__name__} has no sigmas"
            return Refusal(f"{what}, so what a step is worth is not known", "calibrate with another scheduler")
        return None

    def begin(self, generation: Generation) -> None:
        """Raises:
        RefusedError: the call asks the scheduler for noise.
        """
        noisy = stochastic_call(generation)
        if noisy is not None:
            raise RefusedError(f"{self.name}: {noisy}; calibrate without")

    def step_in(self, step: StepCall) -> None:
        state = vars(step.generation.memory(self))
        if step.generation.steps_done == 0:
            state.update(seen={}, branches=len(step.generation.branches))
        state["seen"][step.step.index] = step.model_output.detach().to("cpu", copy=True)

    def denoiser_out(self, call: Any) -> None:
        """Nothing; the engine tells branches apart only where some feature watches the denoiser."""

    def end(self, generation: Generation) -> None:
        state, order = vars(generation.memory(self)), generation.order
        seen: dict[int, torch.Tensor] = state.pop("seen", {})
        key = key_of(generation, tuple(seen[0].shape[1:]), state["branches"]) if seen else None
        if key is None or sorted(seen) != list(range(generation.steps_done)) or generation.positions != key.grid.steps:
            return  # interrupted, by an exception say
        stages = [[seen[i] for i in range(len(seen)) if i // order == position] for position in range(key.grid.steps)]
        self.runs.append(Run(key, gram_of([several[0] if len(several) == 1 else mean(several) for several in stages])))


def mean(several: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([tensor.float() for tensor in several]).mean(0)


def gram_of(velocities: Sequence[torch.Tensor]) -> np.ndarray:
    """(B, N, N) of N tensors (B, ...): mean over the elements of the products of two of them, in 64-bit floats."""
    rows = [velocity.flatten(1) for velocity in velocities]
    batch, elements = rows[0].shape
    found = np.zeros((batch, len(rows), len(rows)))
    for sample in range(batch):
        for start in range(0, elements, CHUNK):
            part = torch.stack([row[sample, start : start + CHUNK] for row in rows]).double()
            found[sample] += (part @ part.T).numpy()
    return found / elements
