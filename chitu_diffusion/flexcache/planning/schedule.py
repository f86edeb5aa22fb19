"""Which steps to compute: an exact search over all schedules of a budget, priced by the forecast that will run.

A gap between the computed steps b and c moves the latent by ``Σ Δσ_τ v̂_τ`` instead of ``Σ Δσ_τ v_τ``. The cost of the gap is the
length of the *difference of the sums*: errors of opposite sign cancel as they do in the integral. (DPCache,
https://arxiv.org/abs/2602.22654, and LeMiCa, https://arxiv.org/abs/2511.00090, add up absolute errors.) A forecast depends on
two computed steps, so the state of the dynamic program is the pair of the last two and the search is exact for costs that add up.
What does not add up, signs from gap to gap and what is left from before, `combine.price` knows; it chooses among candidates.
`improve` goes on from there by true errors, if somebody measures them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ..schedule import growing, uniform
from .combine import DEFAULT, Plan, Setting, fitted, growth, response
from .gram import Array, Index, Tables
from .predict import solve

Evaluate = Callable[[list[Plan]], Sequence[float]]
Refit = Callable[[tuple[int, ...]], Plan]


def plan(tables: Tables, budget: int, setting: Setting = DEFAULT, more: Sequence[Sequence[int]] = ()) -> Plan:
    """The plan of `budget` computed steps of least predicted error among the `candidates`.

    A local search by the prediction is left out: before drift was measured it found signs that cancel in the calibration prompts
    and in no others. Now it gains, see `docs/negative-results.md`.

    Raises:
        ValueError: a budget that is not from 1 to N.
    """
    return min(candidates(tables, budget, setting, more), key=lambda found: found.predicted)


def candidates(
    tables: Tables, budget: int, setting: Setting = DEFAULT, more: Sequence[Sequence[int]] = ()
) -> Iterator[Plan]:
    """Plans of `budget` computed steps: uniform, growing, the exact search, and schedules that are handed in."""
    if not 1 <= budget <= tables.steps:
        raise ValueError(f"the budget has to be from 1 to {tables.steps} steps, got {budget}")
    found = searched(tables, setting)[budget - 1][0]
    for steps in (uniform(budget, tables.steps), growing(budget, tables.steps), found, *more):
        yield fitted(tables, steps, setting)


def plan_for_error(tables: Tables, error: float, setting: Setting = DEFAULT) -> Plan:
    """The plan of fewest computed steps whose predicted error is at most `error`; all steps if no other is."""
    for steps, _ in searched(tables, setting):
        found = fitted(tables, steps, setting)
        if found.predicted <= error:
            return found
    return fitted(tables, range(tables.steps), setting)


def improve(start: Plan, evaluate: Evaluate, refit: Refit, total: int, sweeps: int = 1) -> Plan:
    """Local search at the same budget: step by step, a computed step moves by one or two if that helps.

    Args:
        start: the plan to begin with.
        evaluate: errors of plans, smaller is better; it gets all moves of one step at once.
        refit: steps -> the plan with its weights.
        total: N.
        sweeps: how often to go through the steps, at most; it ends earlier when nothing moves any more.
    """
    best, error = start, evaluate([start])[0]
    for _ in range(sweeps):
        before = best
        for step in before.steps[1:]:
            moves = [refit(steps) for steps in _moved(best.steps, step, total)]
            errors = evaluate(moves) if moves else [error]
            first = int(np.argmin(errors))
            if errors[first] < error:
                best, error = moves[first], errors[first]
        if best is before:
            return best
    return best


def _moved(steps: tuple[int, ...], step: int, total: int) -> Iterator[tuple[int, ...]]:
    """The schedules in which `step` is elsewhere by one or two."""
    taken = set(steps)
    for at in (step - 2, step - 1, step + 1, step + 2):
        if 0 < at < total and at not in taken:
            yield tuple(sorted(taken - {step} | {at}))


# -- the exact search ---------------------------------------------------------------------------------------------------


def searched(
    tables: Tables, setting: Setting = DEFAULT, squares: Array | None = None
) -> list[tuple[tuple[int, ...], float]]:
    """The best schedule of every budget from 1 to N, and its cost. One pass, exact for costs of gaps that add up.

    ``best[b, c]`` is the cheapest way to have computed m steps of which b and c are the last.

    Args:
        tables: of the calibration.
        setting: what runs in the gaps.
        squares: squared costs to go by, as `gap_costs` returns; those if None.
    """
    costs = (gap_costs(tables, setting) if squares is None else squares) ** (setting.power / 2)
    steps = tables.steps
    best = np.full((steps, steps), np.inf)
    best[0, 0] = 0
    backs: list[Array] = []
    found = []
    for _ in range(steps):
        ends = best + costs[:, :, steps]
        before, last = np.unravel_index(np.argmin(ends), ends.shape)
        found.append((_traced(backs, int(before), int(last)), float(ends[before, last]) ** (1 / setting.power)))
        reach = best[:, :, None] + costs[:, :, :steps]
        backs.append(reach.argmin(0))
        best = reach.min(0)
    return found


def _traced(backs: Sequence[Array], before: int, last: int) -> tuple[int, ...]:
    steps = [last]
    for back in reversed(backs):
        before, last = int(back[before, last]), before
        steps.append(last)
    return tuple(reversed(steps))


def gap_costs(tables: Tables, setting: Setting = DEFAULT) -> Array:
    """Relative squared costs of all gaps, (N, N, N + 1) for ``a, b, c``: the mean over the calibration runs.

    It is the gap between the computed steps b and c when a was computed last before b; a = b = 0 says that there was none. c = N is
    the end of the run. Impossible ones are infinite.
    """
    steps = tables.steps
    costs = np.full((steps, steps, steps + 1), np.inf)
    gaps = _Gaps(tables, setting)
    for b in range(steps):
        costs[: max(b, 1), b, b + 1 :] = gaps.costs(b)
    return costs


class _Gaps:
    """Inner products between velocities and the ways over gaps, and what follows from them; P runs, A times a, C times c."""

    def __init__(self, tables: Tables, setting: Setting) -> None:
        self.tables, self.setting = tables, setting
        self.growth, self.response = growth(tables, setting), response(tables, setting)
        start = np.zeros((len(tables.gram), 1, tables.steps))
        steps = tables.deltas[None, :, None] * tables.relative
        self.ways_velocities = np.concatenate([start, steps.cumsum(1)], 1)  # <X_k, v_j>: (P, N + 1, N)
        columns = (self.ways_velocities * tables.deltas).cumsum(2)
        self.ways_ways = np.concatenate([np.zeros_like(columns[:, :, :1]), columns], 2)  # <X_k, X_l>

    def costs(self, b: int) -> Array:
        """(A, C) for a before b and c after it."""
        tables, before = self.tables, np.arange(max(b, 1))
        later = np.arange(b + 1, tables.steps + 1)
        short, rests = self._rests(b, later)
        forecast = self._left(b, before, later, short, rests, ends=False)
        corrected = forecast.copy()
        if self.setting.correct:
            corrected[:, :-1] = self._left(b, before, later[:-1], short[:, :-1], rests, ends=True)
            moved = self.response[later[:-1]] * (tables.sigmas[b] - tables.sigmas[later[:-1]])
            corrected[:, :-1] += moved**2 * forecast[:, :-1]
        corrected[:, 0] = 0  # no gap between neighbours
        return np.maximum(corrected, 0) * self.growth[later] ** 2

    def _rests(self, b: int, later: Index) -> tuple[Array, Array]:
        """What holding v_b leaves of the way over the gap: its squared length (P, C), and <rest, v_j> (P, C, N)."""
        gram, length = self.tables.relative, self.tables.sigmas[later] - self.tables.sigmas[b + 1]
        way = self.ways_velocities[:, later] - self.ways_velocities[:, [b + 1]]
        square = (
            self.ways_ways[:, later, later] - 2 * self.ways_ways[:, later, b + 1] + self.ways_ways[:, [b + 1], b + 1]
        )
        square = square - 2 * length * way[:, :, b] + length**2 * gram[:, [b], b]
        return square, way - length[:, None] * gram[:, [b]]

    def _left(self, b: int, before: Index, later: Index, short: Array, rests: Array, ends: bool) -> Array:
        """(A, C) mean squares of what the differences to v_a, and with `ends` to v_c, do not explain of the rest."""
        gram = self.tables.relative
        shape = (len(gram), len(before), len(later))
        others = [np.broadcast_to(before[:, None], shape[1:])] if self.setting.memory > 1 else []
        others += [np.broadcast_to(later[None], shape[1:])] * ends
        if not others or (self.setting.method == "hold" and not ends):
            return np.broadcast_to(short.mean(0), shape[1:]).copy()
        index = np.arange(len(later))
        aims = np.stack([rests[:, index, o] - rests[:, : len(later), [b]].transpose(0, 2, 1) for o in others], -1)
        products = np.stack(
            [
                np.stack([gram[:, o, p] - gram[:, o, b] - gram[:, b, p] + gram[:, [[b]], b] for p in others], -1)
                for o in others
            ],
            -2,
        )
        if self.setting.method == "ridge":
            found = solve(products.mean(0), aims.mean(0), self.setting.ridge)
        else:
            found = self._line(b, before, later, ends)
        square = short[:, None] - 2 * np.einsum("acm,pacm->pac", found, aims)
        return (square + np.einsum("acm,pacmn,acn->pac", found, products, found)).mean(0)

    def _line(self, b: int, before: Index, later: Index, ends: bool) -> Array:
        """(A, C, M) coefficients of a line: through a and b, or with `ends` through b and c."""
        places = np.concatenate([[0.0], (self.tables.deltas * (np.arange(self.tables.steps) - b)).cumsum()])
        moments = places[later] - places[b + 1]  # Σ Δσ_τ (τ - b)
        if ends:
            along = np.broadcast_to(moments / (later - b), (len(before), len(later)))
            rest = [np.zeros_like(along)] if self.setting.memory > 1 else []
            return np.stack([*rest, along], -1)
        back = np.where(before < b, before - b, -np.inf)  # none before: hold
        return (moments[None] / back[:, None])[..., None]
