"""From a profile to what one generation computes: the plan, the weights of its forecasts, and the guard over both."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from chitu_hooks import RefusedError

from .combine import Plan, Setting, fitted
from .gram import Tables
from .grid import Grid
from .kept import Innovation, relative
from .key import Key
from .params import Planned
from .predict import weights
from .profile import Profile
from .within import FREE, Limits, plan_within, plans_within

FAR = 3.0
"""From which on an innovation is far from what was calibrated: standard deviations of its logarithm over the samples."""
LEAST_INNOVATION = 1e-6
"""Relative; smaller ones are rounding."""
LEAST_SPREAD = 0.1
"""Of that logarithm: a few samples may agree by chance."""


class Course:
    """What one generation computes. The guard may change what is still to come.

    Attributes:
        tables: of this kind of run.
        setting: how it forecasts.
        plan: as it is now.
        guard: computed steps that it may have more or fewer than planned.
        limits: what the guard keeps to, as the plan does.
        expected: in words, what the report says is to be expected.
        notes: in what the run is none of those measured.
    """

    def __init__(
        self,
        tables: Tables,
        setting: Setting,
        plan: Plan,
        *,
        guard: int = 0,
        limits: Limits = FREE,
        expected: Mapping[str, float] | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self.tables = tables
        self.setting = setting
        self.plan = self.planned = plan
        self.guard = guard
        self.limits = limits
        self.expected = expected or {}
        self.notes = notes
        self.computed = frozenset(plan.steps)
        self.moves: list[str] = []
        """In what the run is not as planned, in words."""
        self.surprises: list[float] = []
        """Of every computed step but the first: standard deviations of its innovation from that of the calibration."""

    @property
    def steps(self) -> int:
        return self.tables.steps

    @property
    def complete(self) -> bool:
        return len(self.computed) == self.steps

    def given(self, position: int) -> tuple[tuple[int, float], ...] | None:
        """Pairs of a computed position and its weight: the scheduler gets that sum at `position`. None: what was computed."""
        return self.plan.weights.get(position)

    def forecast(self, history: Sequence[int], position: int) -> tuple[tuple[int, float], ...]:
        """The same for a forecast from computed positions before, the newest first, whatever the plan is."""
        found = weights(self.tables.mean, history, position, self.setting.method, ridge=self.setting.ridge)
        return tuple(zip(history, found))

    def add(self, position: int) -> None:
        """`position` is computed although it was not planned: what comes after it is forecast from it too, and what the scheduler
        was given on the way to it stays as it was."""
        given = {at: pairs for at, pairs in self.plan.weights.items() if at < position}
        self._take(self.computed | {position}, given)
        self.moves.append(f"computed step {position}, which could not be skipped")

    def _take(self, steps: Iterable[int], given: Mapping[int, Any] | None = None) -> None:
        self.plan = fitted(self.tables, sorted(steps), self.setting, given)
        self.computed = frozenset(self.plan.steps)

    # -- the guard --------------------------------------------------------------------------------------------------

    def heed(self, innovation: Innovation) -> None:
        """Compute one step more, or one fewer, of those to come, where the guard says so and has room."""
        found, position = self._surprise(innovation), innovation[1]
        spent = len(self.computed) - len(self.planned.steps)
        rest = frozenset(range(position + 1, self.steps))
        if found > FAR and spent < self.guard:
            self._move("added", {at: self.computed | {at} for at in rest - self.computed}, position)
        elif found < -FAR and spent > -self.guard:
            fewer = {at: self.computed - {at} for at in rest & self.computed}
            allowed = {at: steps for at, steps in fewer.items() if self.limits.allow(steps, self.steps)}
            self._move("left out", allowed, position)

    def _move(self, what: str, choices: dict[int, frozenset[int]], position: int) -> None:
        """Take the choice that is foretold to be best; every rank, and every repetition, comes to the same."""
        if choices:
            errors = {at: fitted(self.tables, sorted(steps), self.setting).predicted for at, steps in choices.items()}
            at = min(choices, key=lambda at: (errors[at], at))
            self._take(choices[at])
            self.moves.append(f"{what} step {at}, seen at {position}")

    def look_back(self, innovations: Iterable[Innovation]) -> list[str]:
        """Notes on a run that is over, with the innovations that were not heeded.

        A LoRA, say, or guidance that a callback changed, makes other predictions than those of the calibration.
        """
        for innovation in innovations:
            self._surprise(innovation)
        found = float(np.mean(self.surprises)) if self.surprises else 0.0
        if abs(found) < FAR:
            return list(self.notes)
        return [
            *self.notes,
            f"predictions changed far {'more' if found > 0 else 'less'} from step to step than in the calibration, by "
            f"{abs(found):.1f} standard deviations in the mean: the profile does not fit these weights or this call; calibrate "
            "again",
        ]

    def _surprise(self, innovation: Innovation) -> float:
        """How far the largest of the samples' innovations is from the calibration's; 0 if one is zero or no number."""
        history, position, sums = innovation
        innovations = relative(sums)
        if not all(math.isfinite(value) and value > 0 for value in innovations):
            return 0.0
        mean, spread = self.spread(history, position)
        self.surprises.append((math.log(max(innovations)) - mean) / spread)
        return self.surprises[-1]

    def spread(self, history: Sequence[int], position: int) -> tuple[float, float]:
        """Mean and standard deviation, over the samples, of the logarithm of |prediction - forecast| / |prediction|."""
        signs = np.zeros(self.steps)
        for at, weight in self.forecast(history, position):
            signs[at] = weight
        signs[position] -= 1.0
        gram = self.tables.gram
        missed = np.maximum(np.einsum("i,pij,j->p", signs, gram, signs), 0.0)
        logs = 0.5 * np.log(np.maximum(missed / gram[:, position, position], LEAST_INNOVATION**2))
        return float(logs.mean()), max(LEAST_SPREAD, float(logs.std(ddof=1)) if len(logs) > 1 else 0.0)

    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = {"computes": sorted(self.computed), "of": self.steps, **self.expected}
        if self.surprises:
            found["surprise"] = round(float(np.mean(self.surprises)), 2)
        if self.moves or self.guard:
            found["changes"] = self.moves
        return found


@dataclass(frozen=True)
class Made:
    """A plan for one kind of run, and what it was made from."""

    tables: Tables
    setting: Setting
    limits: Limits
    plan: Plan
    notes: tuple[str, ...]


class Planner:
    """Plans from one profile, each made once.

    Args:
        params: what to aim at.
        profile: what is known of the model.
    """

    def __init__(self, params: Planned, profile: Profile) -> None:
        self.params = params
        self.profile = profile
        self._made: dict[str, Made] = {}

    def course(self, key: Key) -> Course:
        """The course of a run with `key`.

        Raises:
            RefusedError: the profile is of other runs and may not be stretched, or no plan reaches what was asked for.
        """
        name = repr(key)
        if name not in self._made:
            differences = self.profile.key.unlike(key)
            if differences and not self.params.stretch:
                raise RefusedError(
                    f"planned: {'; '.join(differences)}; calibrate for such runs, or take it by sigma with stretch=True"
                )
            self._made[name] = self._make(key.grid, tuple(differences))
        made = self._made[name]
        return Course(
            made.tables,
            made.setting,
            made.plan,
            guard=self.params.guard,
            limits=made.limits,
            expected=self._expected(made.plan.predicted),
            notes=made.notes,
        )

    def _expected(self, predicted: float) -> dict[str, float]:
        psnr = self.profile.psnr(predicted)
        known = {} if psnr is None or not math.isfinite(psnr) else {"expected psnr": round(psnr, 1)}
        return {"expected error": float(f"{self.profile.error(predicted):.3g}"), **known}

    def _make(self, grid: Grid, notes: tuple[str, ...]) -> Made:
        tables = self.profile.fitted(grid)
        setting = Setting(correct=grid.adds_velocities)
        warm, cool = min(self.params.warmup, grid.steps), min(self.params.cooldown, grid.steps)
        always = frozenset((*range(warm), *range(grid.steps - cool, grid.steps)))
        limits = Limits(always, self.params.max_consecutive)
        return Made(tables, setting, limits, self._plan(tables, setting, limits), notes)

    def _plan(self, tables: Tables, setting: Setting, limits: Limits) -> Plan:
        params, steps = self.params, tables.steps
        if params.psnr is None:
            return plan_within(tables, params.computed(steps), setting, limits)
        if self.profile.psnr(1.0) is None:
            raise RefusedError(
                f"planned: what psnr={params.psnr:g} takes is not known, since the calibration returned latents; calibrate with "
                "pictures, or give budget or speedup"
            )
        best = 0.0
        for made in plans_within(tables, setting, limits):
            if len(made.steps) == steps:
                break
            best = max(best, self.profile.psnr(made.predicted) or 0.0)
            if best >= params.psnr:
                return made
        raise RefusedError(
            f"planned: psnr={params.psnr:g} leaves no step to skip: {steps - 1} of {steps} computed can be expected to give "
            f"{best:.1f} dB; ask for at most that"
        )
