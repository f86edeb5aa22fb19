"""Plans within the limits that all strategies share: positions that are always computed, and the longest gap."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from .combine import Plan, Setting, fitted
from .gram import Array, Tables
from .schedule import gap_costs, plan, searched


@dataclass(frozen=True)
class Limits:
    """What a plan has to keep to."""

    always: frozenset[int] = frozenset({0})
    """Positions that are computed."""
    longest: int | None = None
    """Most positions to skip in a row."""

    @property
    def free(self) -> bool:
        """Whether every schedule keeps to them."""
        return self.always <= {0} and self.longest is None

    def allow(self, schedule: Iterable[int], total: int) -> bool:
        """Whether these computed steps, of a run of `total`, keep to them."""
        ends = (*sorted(schedule), total)
        return all(self.spans(start, end) for start, end in pairwise(ends))

    def spans(self, start: int, end: int) -> bool:
        """Whether there may be a gap between the computed steps `start` and `end`."""
        inside = range(start + 1, end)
        return (self.longest is None or len(inside) <= self.longest) and self.always.isdisjoint(inside)


FREE = Limits()
"""None but that the first step is computed."""


def plan_within(tables: Tables, budget: int, setting: Setting, limits: Limits) -> Plan:
    """The best plan of `budget` computed steps, or of the fewest more with which the limits can be kept."""
    if limits.free:
        return plan(tables, budget, setting)
    return next(found for found in plans_within(tables, setting, limits) if len(found.steps) >= budget)


def plans_within(tables: Tables, setting: Setting, limits: Limits) -> Iterator[Plan]:
    """The exact search's plan for every number of steps with which the limits can be kept, the fewest first."""
    for steps, cost in searched(tables, setting, _costs_within(tables, setting, limits)):
        if np.isfinite(cost):
            yield fitted(tables, steps, setting)


def _costs_within(tables: Tables, setting: Setting, limits: Limits) -> Array:
    """`gap_costs`, infinite for gaps that are not allowed."""
    costs, steps = gap_costs(tables, setting), tables.steps
    costs[:, [[not limits.spans(b, c) for c in range(steps + 1)] for b in range(steps)]] = np.inf
    return costs
