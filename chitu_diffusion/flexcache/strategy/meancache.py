"""`meancache`: the mean velocity over a gap, given to the scheduler in place of the guided prediction."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from chitu_hooks import Call, Generation, HookMap, Refusal, RefusedError, Sites, StepCall
from chitu_hooks.branches import signature

from .. import latent
from ..distance import copied
from ..params import MeanCache
from .static import ScheduledStrategy


class MeanCacheStrategy(ScheduledStrategy):
    """Nothing runs at a skipped step: each branch returns its last output, and the scheduler gets the mean velocity.

    What guidance makes of the branches' placeholders is dropped, so that rescaling and intervals of guidance act on
    computed predictions only.
    """

    params: MeanCache
    skips_trunk = False
    start: ClassVar[dict[str, Any]] = {"signature": None, "output": None}

    def bind(self, sites: Sites, hook_map: HookMap) -> Refusal | None:
        return self._unsuited(getattr(sites.pipe, "scheduler", None)) or super().bind(sites, hook_map)

    def begin(self, generation: Generation) -> None:
        super().begin(generation)
        unsuited = self._unsuited(generation.scheduler)  # it may have been replaced after patching
        if unsuited is not None:
            raise RefusedError(f"{self.name}: {unsuited}")
        vars(generation.memory(self)).update(latent.START, log=[], anchor=0, skipped=-1, sigmas=None)

    def _unsuited(self, scheduler: Any) -> Refusal | None:
        if self.params.window == 1 or isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
            return None
        return Refusal(
            f"window={self.params.window} takes the slope of a velocity over sigma, and {type(scheduler).__name__} is no "
            "FlowMatchEulerDiscreteScheduler",
            "use window=1, which holds the prediction, or that scheduler",
        )

    # -- each branch ------------------------------------------------------------------------------------------------

    def denoiser_in(self, call: Call) -> Any | None:
        self.see(call)
        return copied(self.memory(call.branch).output) if self._in_gap(call) else None

    def _in_gap(self, call: Call) -> bool:
        if not self.decide(call):
            return False
        call.generation.memory(self).skipped = call.step.index
        return True

    def possible(self, call: Call) -> bool:
        memory = self.memory(call.branch)
        return memory.signature is not None and memory.signature == call.signature

    def learn(self, call: Call) -> None:
        memory = self.memory(call.branch)
        memory.signature, memory.output = call.signature, copied(call.sample)

    def denoiser_out(self, call: Call) -> None:
        if not call.elsewhere:
            return super().denoiser_out(call)
        # The schedule and the shapes say what the rank does that runs this call, so that all ranks have the same gaps.
        call.signature = signature(call)
        if not self._in_gap(call):
            vars(self.memory(call.branch)).update(run=0, signature=call.signature, output=None)
        return None

    # -- the guided prediction --------------------------------------------------------------------------------------

    def step_in(self, step: StepCall) -> None:
        state, computed = step.generation.memory(self), self.computed(step.generation)
        gap = state.skipped == step.step.index
        if gap:
            step.model_output = self._mean_velocity(step, state)
        else:
            del state.log[: max(0, len(state.log) - self.params.window)]
            state.anchor = len(state.log)
        state.log.append((step.step.schedule_index, step.model_output))
        latent.enter(step, state, keep=gap or step.step.position + 1 not in computed)

    def step_out(self, step: StepCall) -> None:
        latent.leave(step, step.generation.memory(self))

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
