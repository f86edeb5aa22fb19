"""What a profile foretells, in numbers: for a table, and for whoever chooses a budget."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from .course import Planner
from .params import Planned
from .profile import Check, Profile

SPEEDUPS = (1.5, 2.0, 3.0, 5.0)


def told(profile: Profile) -> dict[str, Any]:
    """What the profile is of, and a plan for each of a few budgets, as plain data.

    Under ``plans``: `steps` computed and `computes` which ones, what is to be expected, the relative `error` of the final latent
    and the PSNR, `expected`; and of budgets that were tried what came out, `psnr` in the mean over the pictures and `worst`.
    """
    key = profile.key
    counts = {Planned(speedup=speedup).computed(key.grid.steps) for speedup in SPEEDUPS}
    tried = {check.computed: check for check in profile.checks}
    rows = [_row(profile, count, tried.get(count)) for count in sorted({*counts, *tried}, reverse=True)]
    return {
        "model": profile.model,
        "scheduler": key.grid.scheduler,
        "steps": key.grid.steps,
        "size": list(key.size),
        "guidance": key.guidance,
        "samples": len(profile.tables.gram),
        "plans": rows,
        "checks": [dataclasses.asdict(check) for check in profile.checks],
    }


def _row(profile: Profile, count: int, check: Check | None) -> dict[str, Any]:
    steps = profile.key.grid.steps
    plan = Planner(Planned(budget=count / steps), profile).course(profile.key).plan
    expected = profile.psnr(plan.predicted)
    pictures = check.psnr if check is not None else ()
    return {
        "speedup": round(steps / count, 2),
        "steps": count,
        "computes": list(plan.steps),
        "error": float(f"{profile.error(plan.predicted):.3g}"),
        "expected": None if expected is None or not math.isfinite(expected) else round(expected, 1),
        "psnr": round(sum(pictures) / len(pictures), 1) if pictures else None,
        "worst": round(min(pictures), 1) if pictures else None,
    }
