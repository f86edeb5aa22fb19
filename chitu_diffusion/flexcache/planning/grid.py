"""The grid of one run: where in the noise each position is, and what a prediction is worth there."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from chitu_hooks import Generation


@dataclass(frozen=True)
class Grid:
    """The positions of a run that are visited, in the scheduler's own terms."""

    scheduler: str
    """Its class."""
    prediction: str
    """What the model predicts: `flow`, `epsilon`, `v_prediction` or `sample`."""
    sigmas: tuple[float, ...]
    """N + 1: noise over signal at each position, and where the last step arrives; for flow matching the part of noise."""

    @property
    def steps(self) -> int:
        return len(self.sigmas) - 1

    @property
    def adds_velocities(self) -> bool:
        """Whether a step adds the prediction times the change of sigma to the latent, and nothing else."""
        return self.scheduler == "FlowMatchEulerDiscreteScheduler"

    @property
    def times(self) -> tuple[float, ...]:
        """N + 1: where each position is, so that a prediction's error times the way to the next position is the error of the
        latent at its own scale.

        A flow is integrated over sigma as it is. Elsewhere x / signal is integrated, dx = epsilon dsigma, and the latent
        grows with sqrt(1 + sigma²): the way is that of asinh for epsilon, and of the angle for v.
        """
        if self.prediction == "flow":
            rises = self.sigmas[-1] > self.sigmas[0]  # some count from the noise on; what a step is worth is the same
            return tuple(self.sigmas[-1] - sigma for sigma in self.sigmas) if rises else self.sigmas
        return tuple((math.atan if self.prediction == "v_prediction" else math.asinh)(sigma) for sigma in self.sigmas)

    def is_tail_of(self, other: Grid) -> bool:
        """Whether `other` ends with these positions, to rounding: image to image leaves out its beginning."""
        if self.steps > other.steps:
            return False
        tail = other.sigmas[other.steps - self.steps :]
        return all(math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-5) for a, b in zip(self.sigmas, tail))


def grid_of(generation: Generation) -> Grid | None:
    """The grid of the run that is underway; None while it is not known where in the schedule the run begins.

    Copies the scheduler's sigmas to the host.
    """
    scheduler, steps = generation.scheduler, generation.num_steps
    if steps is None:
        return None
    values = _sigmas(scheduler)
    last = len(generation.timesteps)
    first = last - steps * generation.order + (generation.order - 1 if last % generation.order else 0)
    positions = (values[first + position * generation.order] for position in range(steps))
    return Grid(type(scheduler).__name__, prediction_of(scheduler), (*positions, values[-1]))


def prediction_of(scheduler: Any) -> str:
    """What the model's output is to this scheduler."""
    kind = str(scheduler.config.get("prediction_type", ""))
    flow = type(scheduler).__name__.startswith("FlowMatch") or scheduler.config.get("use_flow_sigmas")
    return "flow" if flow or kind.startswith("flow") else kind or "epsilon"


def has_noise_levels(scheduler: Any) -> bool:
    """Whether `grid_of` can tell where in the noise this scheduler's positions are."""
    return hasattr(scheduler, "sigmas") or hasattr(scheduler, "alphas_cumprod")


def _sigmas(scheduler: Any) -> list[float]:
    """One for each evaluation, and the last one."""
    sigmas = getattr(scheduler, "sigmas", None)
    if sigmas is None:  # a scheduler of the signal's decay: DDIM and its like
        signal = torch.as_tensor(scheduler.alphas_cumprod)[torch.as_tensor(scheduler.timesteps).long().cpu()]
        last = torch.as_tensor(getattr(scheduler, "final_alpha_cumprod", 1.0)).reshape(1)
        signal = torch.cat([signal, last.to(signal)])
        sigmas = (1 / signal - 1).sqrt()
    return [float(sigma) for sigma in torch.as_tensor(sigmas).tolist()]
