"""`meancache`: the mean velocity over a gap, given to the scheduler in place of the guided prediction."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from chitu_hooks import Generation, HookMap, Refusal, RefusedError, Sites, StepCall

from ..params import MeanCache
from .guided import GuidedStrategy
from .static import ScheduledStrategy


class MeanCacheStrategy(GuidedStrategy, ScheduledStrategy):
    """At a skipped step the scheduler gets the mean velocity over the gap, by the slope over a window of steps before it."""

    params: MeanCache

    def bind(self, sites: Sites, hook_map: HookMap) -> Refusal | None:
        return self._unsuited(getattr(sites.pipe, "scheduler", None)) or super().bind(sites, hook_map)

    def begin(self, generation: Generation) -> None:
        super().begin(generation)
        unsuited = self._unsuited(generation.scheduler)  # it may have been replaced after patching
        if unsuited is not None:
            raise RefusedError(f"{self.name}: {unsuited}")
        vars(generation.memory(self)).update(log=[], anchor=0, sigmas=None)

    def _unsuited(self, scheduler: Any) -> Refusal | None:
        if self.params.window == 1 or isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
            return None
        return Refusal(
            f"window={self.params.window} takes the slope of a velocity over sigma, and {type(scheduler).__name__} is no "
            "FlowMatchEulerDiscreteScheduler",
            "use window=1, which holds the prediction, or that scheduler",
        )

    def learn_step(self, step: StepCall, state: SimpleNamespace) -> None:
        del state.log[: max(0, len(state.log) - self.params.window)]
        state.anchor = len(state.log)
        state.log.append((step.step.schedule_index, step.model_output))

    def prediction(self, step: StepCall, state: SimpleNamespace) -> torch.Tensor:
        velocity = self._mean_velocity(step, state)
        state.log.append((step.step.schedule_index, velocity))
        return velocity

    def skips_next(self, step: StepCall) -> bool:
        return step.step.position + 1 not in self.computed(step.generation)

    def _mean_velocity(self, step: StepCall, state: SimpleNamespace) -> torch.Tensor:
        """v + (s - t) J from the last computed sigma t to the next one s, with J the velocity's slope over the window."""
        at, velocity = state.log[state.anchor]
        window = state.log[state.anchor - self.params.window : state.anchor + 1]
        if self.params.window == 1 or state.anchor < self.params.window:
            return velocity
        if state.sigmas is None:
            state.sigmas = step.generation.scheduler.sigmas.tolist()
        later = [position for position in self.computed(step.generation) if position > step.step.position]
        following = min(later, default=step.generation.num_steps or 0) + step.step.schedule_index - step.step.position
        ahead, back = state.sigmas[following] - state.sigmas[at], state.sigmas[at] - state.sigmas[window[0][0]]
        slope, first = torch.zeros_like(velocity, dtype=torch.float32), window[0][1].float()
        # z_t - z_r - (t - r) v_r of the paper, summed from the velocities: the latents carry their rounding.
        for (i, v), (j, _) in itertools.pairwise(window):
            slope += (state.sigmas[j] - state.sigmas[i]) * (v.float() - first)
        return (velocity.float() + ahead / back**2 * slope).to(velocity.dtype)
