"""Plans within the limits that all strategies share: positions that are always computed, and the longest gap."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .combine import Plan, Setting, fitted
from .gram import Tables
from .schedule import improve, plan, searched


@dataclass(frozen=True)
class Limits:
    """What a plan has to keep to."""

    always: frozenset[int] = frozenset({0})
    """Positions that are computed."""
    longest: int | None = None
    """Most positions to skip in a row."""

    def allow(self, steps: tuple[int, ...], total: int) -> bool:
        """Whether a plan may compute just `steps` of `total`."""
        gaps = (after - before - 1 for before, after in zip(steps, (*steps[1:], total)))
        return self.always <= set(steps) and (self.longest is None or max(gaps) <= self.longest)


def plan_within(tables: Tables, budget: int, setting: Setting, limits: Limits) -> Plan:
    """The best plan of `budget` computed steps that is allowed, or of more where none of so few is.

    The exact search knows no limits. Where its plan breaks them, one that keeps to them is filled up from it and improved.
    """
    found = plan(tables, budget, setting)
    if limits.allow(found.steps, tables.steps):
        return found
    steps = _filled(limits, tables.steps, budget, found.steps)

    def errors(plans: list[Plan]) -> list[float]:
        return [p.predicted if limits.allow(p.steps, tables.steps) else np.inf for p in plans]

    return improve(fitted(tables, steps, setting), errors, lambda moved: fitted(tables, moved, setting), tables.steps)


def _filled(limits: Limits, total: int, budget: int, wanted: tuple[int, ...]) -> tuple[int, ...]:
    """What `limits` ask for, and of `wanted` as many as the budget has room for, evenly over the run."""
    steps = {0, *limits.always}
    if limits.longest is not None:
        for before in range(total):
            if not steps.intersection(range(max(0, before - limits.longest), before + 1)):
                steps.add(before)
    others = [*(step for step in wanted if step not in steps), *(step for step in range(total) if step not in wanted)]
    others = [step for step in dict.fromkeys(others) if step not in steps]
    return tuple(sorted({*steps, *others[: max(0, budget - len(steps))]}))


def plans_within(tables: Tables, setting: Setting, limits: Limits) -> Iterator[Plan]:
    """A plan for every budget from the fewest steps on, all of them computed left out."""
    for steps, _ in searched(tables, setting)[:-1]:
        if limits.allow(steps, tables.steps):
            yield fitted(tables, steps, setting)
        else:
            yield plan_within(tables, len(steps), setting, limits)
