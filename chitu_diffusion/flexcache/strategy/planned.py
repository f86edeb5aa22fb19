"""`planned`: a schedule and forecasts that were worked out for this model before the run, from what calibration measured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from chitu_hooks import Call, Generation, HookMap, Refusal, RefusedError, Sites, StepCall

from ..planning.course import Course, Planner
from ..planning.kept import Kept, innovation, keep, read, summed
from ..planning.key import key_of
from ..planning.params import Planned
from ..planning.profile import Profile
from .checks import stochastic, stochastic_call, unplannable
from .guided import GuidedStrategy


class PlannedStrategy(GuidedStrategy):
    """Forecasts the guided prediction of a skipped step from the last computed ones. `profile` is for the file of `params`."""

    params: Planned

    def __init__(self, params: Planned, profile: Profile | None = None) -> None:
        super().__init__(params)
        given = Profile.load(params.profile) if profile is None and params.profile is not None else profile
        self.planner = Planner(params, given) if given is not None else None
        self.course: Course | None = None  # of the last generation, for the report
        self.adaptive = params.guard > 0  # type: ignore[misc]

    def bind(self, sites: Sites, hook_map: HookMap) -> Refusal | None:
        if self.planner is None:
            remedy = "measure one with chitu calibrate --planned FILE, and name it with profile=FILE"
            return Refusal("there is no profile of this model", remedy)
        scheduler = getattr(sites.pipe, "scheduler", None)
        unsuited = unplannable(scheduler, stochastic(scheduler), self.params.guard)
        refusal = unsuited or self.planner.profile.unlike(sites) or super().bind(sites, hook_map)
        if refusal is None:
            self.planner.course(self.planner.profile.key)  # plans before the run, and raises if it cannot
        return refusal

    def begin(self, generation: Generation) -> None:
        super().begin(generation)
        noisy = stochastic_call(generation)  # the call may ask for it
        refusal = unplannable(generation.scheduler, noisy, self.params.guard)
        if refusal is None and self.planner is not None:
            refusal = self.planner.profile.unlike_scheduler(generation.scheduler)  # another one since patching
        if refusal is not None:
            raise RefusedError(f"{self.name}: {refusal}")
        self.course = None
        vars(generation.memory(self)).update(course=None, first=None, kept={}, innovations=[])

    # -- the plan ---------------------------------------------------------------------------------------------------

    def wants(self, call: Call) -> bool:
        return self._skips(call.generation, call.step.position)

    def skips_next(self, step: StepCall) -> bool:
        return self._skips(step.generation, step.step.position + 1)

    def _skips(self, generation: Generation, position: int) -> bool:
        """Known from the first step on, or from the second where the first does not tell where in the schedule it is."""
        state = generation.memory(self)
        if state.course is None and state.first is not None and self.planner is not None:
            key = key_of(generation, *state.first)
            state.course = self.course = self.planner.course(key) if key is not None else None
        return state.course is not None and position not in state.course.computed and position < state.course.steps

    @property
    def full_budget(self) -> bool:
        return self.course is not None and self.course.complete

    # -- the guided prediction --------------------------------------------------------------------------------------

    def learn_step(self, step: StepCall, state: SimpleNamespace) -> None:
        state.first = state.first or (tuple(step.model_output.shape[1:]), len(step.generation.branches))
        kept, position, course = state.kept.setdefault(step.step.stage, {}), step.step.position, state.course
        found = step.model_output.to(torch.float32, copy=True)
        if course is not None and not course.complete:
            if position not in course.computed:
                course.add(position)  # a skip was due, and could not be
            if step.generation.order == 1:  # calibration has the mean of several, which cannot be compared
                self._compare(found, kept, position, state)
        keep(kept, position, found)
        given = course.given(position) if course is not None else None
        if given is not None:
            step.model_output = summed(kept, given)

    def prediction(self, step: StepCall, state: SimpleNamespace) -> torch.Tensor:
        return summed(state.kept.get(step.step.stage) or state.kept[0], state.course.given(step.step.position))

    def _compare(self, found: torch.Tensor, kept: Kept, position: int, state: SimpleNamespace) -> None:
        """What a forecast would have missed at a computed step. Only the guard waits for it."""
        history = tuple(kept)[::-1][:2]
        sums = innovation(found, summed(kept, state.course.forecast(history, position)))
        if state.course.guard:
            state.course.heed((history, position, self.reduce(sums).tolist()))
        else:
            state.innovations.append((history, position, sums))

    def end(self, generation: Generation) -> None:
        if self.course is not None and generation.positions == self.course.steps:
            for text in self.course.look_back(read(generation.memory(self).innovations)):
                generation.note(f"{self.name}: {text}")
        super().end(generation)

    def report(self) -> dict[str, Any]:
        return {**super().report(), **({"plan": self.course.report()} if self.course is not None else {})}
