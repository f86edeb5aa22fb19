"""Draw what a profile of the planned cache foretells: the steps that plans compute, and the error at every budget.

::

    chitu calibrate --prompts ChituBench/prompts/calibration.txt --steps 28 --planned profile.safetensors
    python ChituBench/scripts/planned_schedule.py profile.safetensors --output ChituBench/plots/planned_schedule.png

Left, a row for each budget with a dot for every computed step. Right, the relative error of the final latent that is foretold, for
plans and for a uniform schedule whose velocities are held (a coarser grid of an Euler scheduler), and what came out where the
calibration tried a budget on prompts that its plan was not made from.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt

from chitu_diffusion.flexcache import Planned, Profile
from chitu_diffusion.flexcache.planning import Setting, fitted
from chitu_diffusion.flexcache.planning.course import Planner
from chitu_diffusion.flexcache.planning.tell import SPEEDUPS
from chitu_diffusion.flexcache.schedule import uniform

PLAN, HELD = "#0072b2", "#999999"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("profile", type=Path)
    parser.add_argument("--output", type=Path, default=Path("ChituBench/plots/planned_schedule.png"))
    options = parser.parse_args()
    profile = Profile.load(options.profile)
    matplotlib.use("Agg")
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    draw_schedules(left, profile)
    draw_errors(right, profile)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.output, dpi=150)
    print(options.output)


def draw_schedules(axes: Any, profile: Profile) -> None:
    """Time goes to the right, a budget a row."""
    steps = profile.key.grid.steps
    for row, speedup in enumerate(SPEEDUPS):
        computed = planned(profile, Planned(speedup=speedup).computed(steps)).steps
        skipped = [step for step in range(steps) if step not in computed]
        axes.plot(skipped, [row] * len(skipped), "o", mfc="none", color=HELD, markersize=4)
        axes.plot(computed, [row] * len(computed), "o", color=PLAN, markersize=6)
    axes.set_yticks(range(len(SPEEDUPS)), [f"{speedup:g}×" for speedup in SPEEDUPS])
    axes.invert_yaxis()
    axes.set(xlabel=f"step of {steps}", title="computed (full) and skipped (open) steps")


def draw_errors(axes: Any, profile: Profile) -> None:
    """Errors over the number of computed steps."""
    tables, counts = profile.tables, range(2, profile.key.grid.steps)
    plans = [planned(profile, count).predicted for count in counts]
    held = Setting(method="hold", correct=False)
    coarse = [fitted(tables, uniform(count, tables.steps), held).predicted for count in counts]
    axes.semilogy(counts, coarse, color=HELD, label="uniform, held: foretold")
    axes.semilogy(counts, plans, color=PLAN, label="planned: foretold")
    tried = [(check.computed, check.error) for check in profile.checks]
    axes.semilogy(*zip(*tried), "s", color=PLAN, markersize=5, label="planned: tried on other prompts")
    axes.set(xlabel="computed steps", title="relative error of the final latent")
    axes.grid(which="both", alpha=0.2)
    axes.legend(frameon=False)


def planned(profile: Profile, count: int) -> Any:
    """The plan that computes `count` steps."""
    return Planner(Planned(budget=count / profile.key.grid.steps), profile).course(profile.key).plan


if __name__ == "__main__":
    main()
