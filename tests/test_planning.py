"""The mathematics of planned schedules: against brute force, on Gram matrices of smooth random paths."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from chitu_diffusion.flexcache.planning import (
    Plan,
    Setting,
    Tables,
    candidates,
    fitted,
    gap_costs,
    improve,
    plan,
    plan_for_error,
    price,
    searched,
    weights,
)
from chitu_diffusion.flexcache.planning.combine import growth, matrix, response
from chitu_diffusion.flexcache.planning.course import Course

PLAIN = Setting(growth=0.0, response=0.0)
SETTINGS = [
    replace(PLAIN, method=method, correct=correct)
    for method in ("hold", "linear", "ridge")
    for correct in (False, True)
]
STEPS = 9


def paths(steps: int = STEPS, runs: int = 3, size: int = 24, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Sigmas (N + 1) and velocities (P, N, size) that bend, differently in each run."""
    dice = np.random.default_rng(seed)
    sigmas = np.append(np.linspace(1, 0.08, steps), 0)
    velocities = sum(
        dice.normal(size=(runs, 1, size)) * np.cos(rate * sigmas[:steps, None] + dice.normal(size=(runs, 1, 1)))
        for rate in (0.5, 2.0, 5.0, 9.0)
    )
    return sigmas, np.asarray(velocities)


def made(velocities: np.ndarray, sigmas: np.ndarray, **more: np.ndarray) -> Tables:
    return Tables(sigmas, velocities @ velocities.transpose(0, 2, 1) / velocities.shape[2], **more)


@pytest.fixture(scope="module")
def tables() -> Tables:
    sigmas, velocities = paths()
    return made(velocities, sigmas)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_the_search_finds_the_minimum_over_all_schedules(tables: Tables, setting: Setting) -> None:
    costs = gap_costs(tables, setting)

    def cost(steps: Sequence[int]) -> float:
        return sum(costs[a, b, c] for a, b, c in zip((0, *steps), steps, (*steps[1:], STEPS))) ** 0.5

    for budget, (steps, found) in enumerate(searched(tables, setting), 1):
        every = [(0, *rest) for rest in itertools.combinations(range(1, STEPS), budget - 1)]
        best = min(every, key=cost)
        assert len(steps) == budget
        assert found == pytest.approx(cost(best), rel=1e-9, abs=1e-12)
        assert cost(steps) == pytest.approx(cost(best), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_the_cost_of_a_gap_is_what_the_weights_leave(setting: Setting) -> None:
    """With one gap, nothing is left from before: the price of the plan and the cost of its gap are one number."""
    sigmas, velocities = paths()
    gains = np.linspace(1.0, 3.0, STEPS + 1)
    setting = replace(setting, ridge=1e-10)  # weights and costs write the same differences in another basis
    for tables in (made(velocities, sigmas), made(velocities, sigmas, gains=gains)):
        costs = gap_costs(tables, setting)
        for b, c in ((0, 3), (1, 3), (3, 6), (4, STEPS), (2, STEPS)):
            steps = [*range(b + 1), *range(c, STEPS)]
            found = fitted(tables, steps, setting)
            cost = float(costs[max(b - 1, 0), b, c])
            if tables.gains is None:
                assert price(tables, found, setting) == pytest.approx(cost**0.5, rel=1e-6, abs=1e-9)
            elif cost > 1e-12:
                plain = float(gap_costs(made(velocities, sigmas), setting)[max(b - 1, 0), b, c])
                assert cost == pytest.approx(plain * gains[c] ** 2, rel=1e-9)


def test_the_price_is_the_true_error_of_the_combined_velocities() -> None:
    sigmas, velocities = paths()
    tables = made(velocities, sigmas)
    found = fitted(tables, (0, 1, 4, 6), PLAIN)
    given = matrix(found, STEPS) @ velocities
    slip = np.einsum("i,pis->ps", tables.deltas, given - velocities)
    way = np.einsum("i,pis->ps", tables.deltas, velocities)
    relative = (slip**2).sum(1) / (way**2).sum(1)
    assert found.predicted == pytest.approx(float(np.sqrt(relative.mean())), rel=1e-9)
    assert found.predicted > 1e-4


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_the_whole_budget_changes_nothing(tables: Tables, setting: Setting) -> None:
    found = plan(tables, STEPS, setting)
    assert found == Plan(tuple(range(STEPS)))  # no weights: the scheduler gets what it always got


@pytest.mark.parametrize("correct", [False, True])
def test_a_constant_velocity_is_held_exactly(correct: bool) -> None:
    velocities = np.repeat(np.random.default_rng(1).normal(size=(2, 1, 8)), STEPS, 1)
    tables = made(velocities, paths()[0])
    for method in ("hold", "linear", "ridge"):
        found = fitted(tables, (0, 4), Setting(method, correct))
        assert found.predicted < 1e-6
        assert all(np.isfinite(w) for pairs in found.weights.values() for _, w in pairs)


@pytest.mark.parametrize("correct", [False, True])
def test_a_straight_line_is_followed_exactly(correct: bool) -> None:
    dice = np.random.default_rng(2)
    velocities = dice.normal(size=(2, 1, 8)) + np.arange(STEPS)[:, None] * dice.normal(size=(2, 1, 8))
    tables = made(velocities, paths()[0])
    for method in ("linear", "ridge"):
        found = fitted(tables, (0, 1, 4, 7), Setting(method, correct, ridge=1e-12))
        assert found.predicted < 1e-6
    assert fitted(tables, (0, 1, 4, 7), Setting("hold", False)).predicted > 1e-3


def test_a_correction_needs_its_own_velocity_and_helps(tables: Tables) -> None:
    steps = (0, 1, 4, 6, 8)
    plain, corrected = (fitted(tables, steps, replace(PLAIN, correct=c)) for c in (False, True))
    assert set(plain.weights) == {2, 3, 5, 7}
    assert set(corrected.weights) == {2, 3, 4, 5, 6, 7, 8}
    assert {j for j, _ in corrected.weights[4]} == {4, 1, 0}
    assert corrected.predicted < 0.8 * plain.predicted


def test_what_is_left_from_before_a_gap_is_undone_or_not() -> None:
    sigmas, velocities = paths(steps=12)
    tables, steps, alone = made(velocities, sigmas), (0, 3, 6, 9), replace(PLAIN, correct=False, undo=0.0)
    for at, pairs in fitted(tables, steps, alone).weights.items():
        history = [step for step in steps if step < at][:-3:-1]
        assert dict(pairs) == pytest.approx(dict(zip(history, weights(tables.mean, history, at))))
    once, gap = fitted(tables, steps, replace(alone, undo=1.0)), tables.deltas[4] + tables.deltas[5]
    left = matrix_error(tables, once, until=4)
    difference = np.eye(12)[3] - np.eye(12)[0]
    share = (difference @ tables.mean @ left) / (difference @ tables.mean @ difference)
    moved = dict(once.weights[4])[3] - dict(fitted(tables, steps, alone).weights[4])[3]
    assert abs(moved) > 1e-3
    assert moved == pytest.approx(-share / gap, rel=1e-3)


def matrix_error(tables: Tables, found: Plan, until: int) -> np.ndarray:
    """Error of the latent before step `until`, as coefficients of the velocities."""
    return (tables.deltas[:, None] * (matrix(found, tables.steps) - np.eye(tables.steps)))[:until].sum(0)


def test_what_was_given_on_the_way_to_an_added_step_stays(tables: Tables) -> None:
    """The scheduler has it by then, so what the added step corrects is the error of those weights."""
    course = Course(tables, Setting(), fitted(tables, (0, 3, 8), Setting()))
    before = course.plan.weights
    course.add(6)
    assert course.plan.steps == (0, 3, 6, 8)
    assert all(course.given(at) == before[at] for at in (1, 2, 3, 4, 5)) and course.given(7) != before[7]
    afresh = fitted(tables, (0, 3, 6, 8), Setting())
    assert course.given(4) != afresh.weights[4] and course.given(6) != afresh.weights[6]


def test_weights_sum_to_one_and_read_only_what_was_computed(tables: Tables) -> None:
    for setting in SETTINGS:
        found = fitted(tables, (0, 2, 3, 7), setting)
        for at, pairs in found.weights.items():
            assert sum(w for _, w in pairs) == pytest.approx(1)
            assert all(j <= at and j in found.steps for j, _ in pairs)


def test_forecasts_by_name(tables: Tables) -> None:
    gram = tables.mean
    assert weights(gram, (4, 2), 6, "hold") == (1.0, 0.0)
    assert weights(gram, (4, 2), 6, "linear") == (2.0, -1.0)
    assert weights(gram, (4, 2), 6, "linear", times=[0, 0, 0, 0, 10, 0, 11, 0, 0]) == pytest.approx((1.1, -0.1))
    assert weights(gram, (4,), 6) == (1.0,)
    strong = weights(gram, (4, 2), 6, "ridge", ridge=1e9)
    assert strong == pytest.approx((1.0, 0.0), abs=1e-6)
    with pytest.raises(ValueError, match="no method 'cubic'"):
        weights(gram, (4, 2), 6, "cubic")


def test_ridge_without_pull_is_least_squares() -> None:
    sigmas, velocities = paths(runs=1)
    v = velocities[0]
    u, *_ = np.linalg.lstsq(np.stack([v[4] - v[2], v[4] - v[1]], 1), v[6] - v[4], rcond=None)
    found = weights(made(velocities, sigmas).gram[0], (4, 2, 1), 6, ridge=1e-13)
    assert found == pytest.approx((1 + u.sum(), -u[0], -u[1]), rel=1e-5)


def test_the_plan_is_the_best_candidate(tables: Tables) -> None:
    for budget in (3, 5, 7):
        found = plan(tables, budget)
        assert len(found.steps) == budget
        assert found.predicted == min(candidate.predicted for candidate in candidates(tables, budget))
    better = plan(tables, 4).steps
    poor = fitted(tables, (0, 1, 2, 3))
    assert poor.predicted > plan(tables, 4).predicted
    assert plan(tables, 4, more=[(0, 1, 2, 3)]).steps == better


def test_local_search_goes_by_the_errors_it_is_given(tables: Tables) -> None:
    aim = (0, 5, 6, 8)
    found = improve(
        fitted(tables, (0, 1, 2, 3)),
        lambda plans: [sum(abs(a - b) for a, b in zip(p.steps, aim)) for p in plans],
        lambda steps: fitted(tables, steps),
        STEPS,
        sweeps=9,
    )
    assert found.steps == aim


def test_the_fewest_steps_for_an_error(tables: Tables) -> None:
    errors = [fitted(tables, steps).predicted for steps, _ in searched(tables)]
    found = plan_for_error(tables, errors[4])
    assert found.predicted <= errors[4]
    assert all(error > errors[4] for error in errors[: len(found.steps) - 1])
    assert len(plan_for_error(tables, 0.0).steps) == STEPS


def test_passing_errors_cost_where_the_velocity_responds() -> None:
    sigmas, velocities = paths()
    calm, lively = (made(velocities, sigmas, response=np.full((1, STEPS), factor)) for factor in (0.0, 5.0))
    steps = (0, 1, 4, 6)
    assert price(lively, fitted(calm, steps), PLAIN) > price(calm, fitted(calm, steps), PLAIN)
    assert gap_costs(lively, PLAIN)[1, 2, 5] > gap_costs(calm, PLAIN)[1, 2, 5]
    assert gap_costs(lively, PLAIN)[1, 2, STEPS] == gap_costs(calm, PLAIN)[1, 2, STEPS]  # nothing is computed after it
    none = replace(PLAIN, correct=False)
    assert fitted(lively, steps, none).predicted == fitted(calm, steps, none).predicted
    assert fitted(made(velocities, sigmas), steps).predicted > fitted(calm, steps, replace(PLAIN, growth=4.0)).predicted


def drifted(velocities: np.ndarray, sigmas: np.ndarray, found: Plan, factor: float, seed: int) -> float:
    """Relative error of the final latent under a plan, where a velocity moves `factor` times as far as its latent, anywhere."""
    dice, size = np.random.default_rng(seed), velocities.shape[2]
    deltas = np.diff(sigmas)
    off, given = np.zeros_like(velocities[:, 0]), []
    for step in range(STEPS):
        turn = np.linalg.qr(dice.normal(size=(size, size)))[0]
        given.append(velocities[:, step] + factor * off @ turn)
        taken = sum(w * given[j] for j, w in found.weights.get(step, ((step, 1.0),)))
        off = off + deltas[step] * (taken - velocities[:, step])
    way = np.einsum("i,pis->ps", deltas, velocities)
    return float(np.sqrt(((off**2).sum(1) / (way**2).sum(1)).mean()))


def test_weights_lean_less_on_velocities_of_latents_that_drifted() -> None:
    steps, factor, gained = (0, 1, 3, 6), 8.0, []
    for seed in range(6):
        sigmas, velocities = paths(size=64, seed=seed)
        lively = made(velocities, sigmas, response=np.full((1, STEPS), factor))
        calm = made(velocities, sigmas, response=np.zeros((1, STEPS)))
        wary, plain = (fitted(tables, steps) for tables in (lively, calm))
        assert dict(wary.weights[3])[3] < dict(plain.weights[3])[3], "the correction trusts what was computed less"
        errors = [np.mean([drifted(velocities, sigmas, p, factor, n) for n in range(4)]) for p in (wary, plain)]
        gained.append(errors[1] / errors[0])
        still = [drifted(velocities, sigmas, p, 0.0, seed) for p in (wary, plain)]
        assert still[1] < still[0], "and it costs something where nothing drifts"
    assert min(gained) > 1 and np.exp(np.mean(np.log(gained))) > 1.2, gained


def test_a_correction_is_least_squares_with_noise_in_what_was_computed() -> None:
    """The noise written out, as one more element of the velocities that is unlike all others."""
    sigmas, velocities = paths(runs=1, size=40)
    tables, setting = made(velocities, sigmas, response=np.full((1, STEPS), 5.0)), replace(PLAIN, ridge=1e-13)
    found, v, deltas = fitted(tables, (0, 1, 4), setting), velocities[0], np.diff(sigmas)
    error = sum(deltas[at] * (sum(w * v[j] for j, w in found.weights[at]) - v[at]) for at in (2, 3))
    one, zero, four = (np.append(v[at], 5.0 * np.linalg.norm(error) * (at == 4)) for at in (1, 0, 4))
    wanted = np.append(v[4] - error / deltas[4], 0) - four
    bends, *_ = np.linalg.lstsq(np.stack([four - one, four - zero], 1), wanted, rcond=None)
    assert dict(found.weights[4]) == pytest.approx({4: 1 + bends.sum(), 1: -bends[0], 0: -bends[1]}, rel=1e-4)


def test_what_errors_do_is_a_matter_of_the_noise_and_not_of_where_a_run_begins(tables: Tables) -> None:
    late = tables.after(4)
    assert np.array_equal(response(late), response(tables)[4:]) and np.array_equal(growth(late), growth(tables)[4:])
    far = replace(tables, sigmas=tables.sigmas * 80)  # of a scheduler whose sigmas are noise over signal
    assert growth(far) == pytest.approx(growth(tables)) and response(far) == pytest.approx(response(tables))


def test_early_errors_count_more(tables: Tables) -> None:
    plain, grown = (gap_costs(tables, replace(PLAIN, growth=factor)) for factor in (0.0, 4.0))
    times = [grown[gap] / plain[gap] for gap in ((0, 0, 3), (2, 3, 5), (5, 6, STEPS))]
    assert times[0] == pytest.approx((1 + 4 * tables.sigmas[3] ** 6) ** 2)
    assert times[0] > times[1] > times[2] == 1


def test_errors_grow_as_velocities_answer_them(tables: Tables) -> None:
    """Where nothing answers an error it stays as it is; by the rule's own response it grows by the rule."""
    rule = response(tables)
    still, own, twice = (growth(replace(tables, response=factor * rule[None])) for factor in (0, 1, 2))
    assert still == pytest.approx(1, abs=1e-5) and own == pytest.approx(growth(tables))
    assert twice - 1 == pytest.approx(2 * (own - 1))
    runs = replace(tables, response=np.stack([rule, 4 * rule]))
    assert response(runs) == pytest.approx(2 * rule) and growth(runs) == pytest.approx(twice)
    assert growth(runs.after(4)) == pytest.approx(growth(runs)[4:])


def test_a_run_that_begins_later(tables: Tables) -> None:
    cut = tables.after(3)
    assert cut.steps == STEPS - 3
    assert np.array_equal(cut.gram[1], tables.gram[1, 3:, 3:])
    assert plan(cut, 3).steps[0] == 0


def test_what_does_not_go_together_is_refused(tables: Tables) -> None:
    with pytest.raises(ValueError, match="do not go with"):
        Tables(tables.sigmas[1:], tables.gram)
    with pytest.raises(ValueError, match="not finite"):
        Tables(tables.sigmas, tables.gram * np.nan)
    for wrong in (np.ones(STEPS), np.ones((1, STEPS - 1)), np.ones((4, STEPS))):
        with pytest.raises(ValueError, match=r"response has shape .*, not \(1 to 3, 9\)"):
            Tables(tables.sigmas, tables.gram, response=wrong)
    with pytest.raises(ValueError, match="below 0"):
        Tables(tables.sigmas, tables.gram, response=np.full((1, STEPS), -1.0))
    with pytest.raises(ValueError, match="from 1 to 9"):
        plan(tables, 10)
    with pytest.raises(ValueError, match="rise from 0"):
        fitted(tables, (1, 2))
