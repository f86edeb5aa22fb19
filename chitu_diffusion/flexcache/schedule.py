"""Schedules: which positions of a run of steps are computed, known before it begins."""

from __future__ import annotations

import math
from collections.abc import Sequence

SCHEDULES = ("uniform", "growing")
"""Schedules that are made for any number of steps and any budget."""


def uniform(budget: int, steps: int) -> tuple[int, ...]:
    """`budget` positions of `steps`, evenly spread from the first to the last."""
    if budget >= steps:
        return tuple(range(steps))
    if budget == 1:
        return (0,)
    return tuple(round(i * (steps - 1) / (budget - 1)) for i in range(budget))


def growing(budget: int, steps: int) -> tuple[int, ...]:
    """`budget` positions of `steps`, from the first to the last, with gaps that grow linearly.

    Early steps decide most of the picture, so they are computed more densely (Spectrum, https://arxiv.org/abs/2603.01623,
    uses such gaps).
    """
    if budget >= steps:
        return tuple(range(steps))
    if budget == 1:
        return (0,)
    spare = steps - budget
    return tuple(i + round(spare * (i / (budget - 1)) ** 2) for i in range(budget))


def ramped(position: int, warmup: int, interval: int) -> bool:
    """Whether `position` is computed where gaps grow by one, from 2 after `warmup` positions up to `interval`."""
    after = position - warmup + 1
    ramp = interval * (interval + 1) // 2 - 1  # 2 + 3 + … + interval
    if after > ramp:
        return (after - ramp) % interval == 0
    root = math.isqrt(8 * after + 9)
    return after <= 0 or root * root == 8 * after + 9  # one more than `after` is 1 + 2 + 3 + …


def stretched(positions: Sequence[int], of: int, steps: int) -> tuple[int, ...]:
    """`positions` made for `of` steps, at the same part of a run of `steps`: the same quantiles of sigma.

    Schedulers place sigma by the part of the run that is over, so a part of the run is a quantile of sigma. Two
    positions that fall together are computed once.
    """
    if of == steps:
        return tuple(positions)
    return tuple(sorted({round(position * (steps - 1) / (of - 1)) for position in positions}))
