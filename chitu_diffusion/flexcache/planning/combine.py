"""Plans: which steps are computed, and what the scheduler is given at every step.

The weights of a plan are fitted from its first step to its last. At each gap the forecast aims at where the full run is at the end
of the gap, not only at the change over it: an error that is left from before is part of the aim, so it is undone and does not add
up. Once the step that ends a gap is computed, the velocities inside are known better, by interpolation; what the forecast lacked
is added at that step. So a gap costs the error of an interpolation, and the model has only been evaluated at the end of a
forecast: a predictor-corrector of Adams type (evaluate once, correct, go on) with fitted coefficients.

What is computed at the end of a forecast is the velocity of a latent that is not where the full run's is, and a velocity moves
several times as far as its latent. In which direction is not known beforehand; how far, is: the weights are fitted to velocities
with noise of that size, and so lean on a velocity the less, the longer the forecast that led to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from .gram import Array, Tables
from .predict import METHODS, RIDGE, line, slopes

LEAST_RESPONSE = 1e-6
"""Less is none; zero has no logarithm."""

Pairs = tuple[tuple[int, float], ...]
Weights = dict[int, Pairs]


@dataclass(frozen=True)
class Setting:
    """What runs between the computed steps.

    Attributes:
        method: one of `predict.METHODS`.
        correct: whether the end of a gap corrects it; only where the scheduler adds ``Δσ v`` (flow matching with Euler).
        memory: the most computed velocities in a forecast; a correction takes one more, the one just computed.
        undo: the part of the error left from before a gap that least squares aim to undo; 0 looks at each gap alone.
        ridge: pull of least squares towards hold.
        power: the search adds up gap costs to this power; 2 takes the errors of gaps for independent.
        growth: how much more than at the end an error counts at the start, where `Tables.gains` were not measured; see `growth`.
        response: how much of the usual response of velocities to errors of the latent is counted, where `Tables.response` was
            not measured; see `response`.
    """

    method: str = "ridge"
    correct: bool = True
    memory: int = 2
    undo: float = 1.0
    ridge: float = RIDGE
    power: float = 2.0
    growth: float = 4.0
    response: float = 1.0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"no method {self.method!r}; there are {', '.join(METHODS)}")
        if self.memory < 1:
            raise ValueError("a forecast needs a memory of at least 1 velocity")


DEFAULT = Setting()


@dataclass(frozen=True)
class Plan:
    """A schedule with its weights.

    Attributes:
        steps: computed positions, from 0.
        weights: position -> pairs of a computed position and its weight: the scheduler is given that sum. All skipped positions
            have one. A computed position has one where it corrects the gap before it, its own velocity among the pairs; a computed
            position without one is given to the scheduler untouched.
        predicted: expected length of the final latent's error, relative to the final latent.
    """

    steps: tuple[int, ...]
    weights: Weights = field(default_factory=dict)
    predicted: float = 0.0


def fitted(
    tables: Tables, steps: Sequence[int], setting: Setting = DEFAULT, given: Mapping[int, Pairs] | None = None
) -> Plan:
    """The plan that computes `steps`, with the weights of `setting`.

    Args:
        tables: of the calibration.
        steps: computed ones, from 0 on.
        setting: how weights are fitted.
        given: weights of positions that are over, which stay as they are.

    Raises:
        ValueError: the steps do not rise from 0 and stay below N.
    """
    steps, total = tuple(steps), tables.steps
    if not steps or steps[0] != 0 or list(steps) != sorted(set(steps)) or steps[-1] >= total:
        raise ValueError(f"steps have to rise from 0 and stay below {total}, got {steps}")
    fit = _Fit(tables, setting, given or {})
    for number, (here, following) in enumerate(zip(steps, (*steps[1:], total))):
        history = steps[max(0, number - setting.memory) : number][::-1]
        fit.computed(here, history, corrects=setting.correct and bool(history) and here - history[0] > 1)
        fit.gap(here, history[: setting.memory - 1], following)
    plan = Plan(steps, fit.weights)
    return replace(plan, predicted=price(tables, plan, setting))


class _Fit:
    """The weights so far, and the error of the latent that they leave.

    Everything is made of the N velocities of the full run and of N noises, one for each step, which are unlike everything else and
    have length 1: (2N) coefficients.
    """

    def __init__(self, tables: Tables, setting: Setting, given: Mapping[int, Pairs]) -> None:
        self.tables, self.setting, self.given = tables, setting, given
        steps = tables.steps
        self.full = np.eye(steps, 2 * steps)
        self.found = self.full.copy()
        self.gram = np.eye(2 * steps)
        self.gram[:steps, :steps] = tables.mean
        self.response = response(tables, setting) * setting.correct  # the rule is one of such schedulers
        self.error = np.zeros(2 * steps)
        self.before = self.error
        self.weights: Weights = {}

    def computed(self, here: int, history: Sequence[int], corrects: bool) -> None:
        """Step `here` is computed; with `corrects`, what the gap before it lacked is added."""
        delta = self.tables.deltas[here]
        length = np.sqrt(max(0.0, float(self.error @ self.gram @ self.error)))
        self.found[here, self.tables.steps + here] = self.response[here] * length
        if not corrects or not delta:
            self.error = self.error + delta * (self.found[here] - self.full[here])
            return
        if self.setting.method == "ridge":
            aim = (1 - self.setting.undo) * self.before - self.error
            bends = self._fit(here, history, aim[None] / delta + self.full[here] - self.found[here])[0]
        else:
            bends = self._to_line(here, history) / delta
        self._give(here, here, history, bends)

    def gap(self, here: int, history: Sequence[int], following: int) -> None:
        """The steps between `here` and `following` are skipped."""
        inside = np.arange(here + 1, following)
        self.before = self.error
        if not len(inside):
            return
        if self.setting.method == "ridge":
            way = self.tables.deltas[inside].sum()  # none where a scheduler takes one timestep twice
            left = self.setting.undo * self.error / way if way else 0.0
            rows = self._fit(here, history, self.full[inside] - self.found[here] - left)
        else:
            rows = np.zeros((len(inside), len(history)))
            if self.setting.method == "linear" and history:
                rows[:, 0] = (inside - here) / (here - history[0])
        for at, bends in zip(inside, rows):
            self._give(int(at), here, history, bends)

    def _fit(self, here: int, history: Sequence[int], aims: Array) -> Array:
        differences = self.found[here] - self.found[list(history)]
        return slopes(self.gram, differences, aims, self.setting.ridge)

    def _to_line(self, here: int, history: Sequence[int]) -> Array:
        """Bends that put the line from the last computed step to `here` in the place of the forecast between them."""
        wanted, total = np.zeros(self.tables.steps), self.tables.deltas
        for at in range(history[0] + 1, here):
            wanted[[history[0], here]] += total[at] * np.array(line(range(here + 1), (history[0], here), at))
            for j, w in self.weights[at]:
                wanted[j] -= total[at] * w
        return -wanted[list(history)]

    def _give(self, at: int, here: int, history: Sequence[int], bends: Array) -> None:
        """At step `at` the scheduler is given ``v_here + Σ bends (v_here - v_history)``."""
        pairs = ((here, 1 + float(bends.sum())), *((j, -float(b)) for j, b in zip(history, bends)))
        self.weights[at] = self.given.get(at) or tuple((j, w) for j, w in pairs if w)
        given = sum(w * self.found[j] for j, w in self.weights[at])
        self.error = self.error + self.tables.deltas[at] * (given - self.full[at])


def matrix(plan: Plan, steps: int) -> Array:
    """(N, N): row i holds the weights of the velocities in what the scheduler is given at step i."""
    rows = np.eye(steps)
    for at, pairs in plan.weights.items():
        rows[at] = 0
        for j, w in pairs:
            rows[at, j] = w
    return rows


def growth(tables: Tables, setting: Setting = DEFAULT) -> Array:
    """(N + 1) how many times an error before each step grows until the end: measured, or ``1 + growth σ⁶``.

    Errors grow by what velocities make of them. So where their response was measured, the growth is as many times that of the rule
    as the response is, over all steps: without any response an error would stay as it is. One number, since a growth that
    follows the scatter from step to step makes schedules that do.
    On the embedded model errors made at σ of 0.95, 0.90, 0.85, 0.76, 0.63 and 0.46 ended 3.2, 2.3, 2.0, 1.7, 1.2 and 0.9 times as
    long (28 steps with guidance 3, geometric means over four prompts).
    """
    if tables.gains is not None:
        return tables.gains
    times = 1.0 if tables.response is None else float(np.exp(np.log(response(tables) / _rule(tables)).mean()))
    return 1 + setting.growth * times * parts(tables) ** 6


def response(tables: Tables, setting: Setting = DEFAULT) -> Array:
    """(N) by how much the velocity of each step moves when the latent moves by 1: measured, or by rule.

    Of what was measured it is the geometric mean over the runs: they differ by factors, and no single one decides.
    The rule follows the embedded model, where it was 12, 8, 7, 4, 3.1, 2.2 and 3 at σ of 0.95, 0.90, 0.85, 0.76, 0.63, 0.46 and
    0.25; under a plan of 10 of 50 steps it was within a third of the rule at every computed step, over eight prompts.
    """
    if tables.response is not None:
        return np.exp(np.log(np.maximum(tables.response, LEAST_RESPONSE)).mean(0))
    return setting.response * _rule(tables)


def _rule(tables: Tables) -> Array:
    part = parts(tables)[:-1]
    return 2 + 11 * part**6 + 3 * (1 - part) ** 2


def parts(tables: Tables) -> Array:
    """(N + 1) the part of noise in the latent before each step; of sigmas that go beyond 1, the part of the first."""
    return tables.sigmas / max(1.0, tables.sigmas[0])


def spread(tables: Tables, plan: Plan, setting: Setting = DEFAULT) -> Array:
    """(P) expected relative squared errors of the final latent, one for each calibration run.

    All gaps with their signs: one quadratic form over the whole run. Errors that are there while a step is computed, and corrected
    after, count through the response of this step's velocity and the weight that it has in the end.
    """
    rows, grows = matrix(plan, tables.steps), growth(tables, setting)
    slips = tables.deltas[:, None] * (rows - np.eye(tables.steps))
    total = tables.sizes(grows[1:] @ slips)
    errors = np.concatenate([np.zeros((1, tables.steps)), slips.cumsum(0)])
    corrects = [step for step in plan.steps[1:] if step in plan.weights]
    passing = tables.sizes(errors[corrects] - errors[[step + 1 for step in corrects]])
    moved = grows[corrects] * response(tables, setting)[corrects] * (tables.deltas @ rows)[corrects]
    return total + passing @ moved**2


def price(tables: Tables, plan: Plan, setting: Setting = DEFAULT) -> float:
    """Expected relative error of the final latent: root mean square over the calibration runs."""
    return float(np.sqrt(spread(tables, plan, setting).mean()))
