"""What each part of the planned cache is worth, row by row, and what an oracle could still gain; on the embedded model::

    python ChituBench/scripts/planned_ablation.py --output ChituBench/results/planned_ablation.json
    python ChituBench/scripts/planned_ablation.py --prompts 1 --steps 8       # a dry run on the CPU

Velocities of full runs are recorded on the prompts of `prompts/calibration.txt`; pictures are those of the last 24 prompts of
`prompts/flexcache.txt` with seeds 0 and 1, which no plan has seen. A row computes the same
steps for all pictures; it is the PSNR of the decoded picture, in floats, to the full run: mean, 95 % interval over prompts, worst.
The loop is the pipeline's own (`FluxPipeline` with true guidance), with the latent in float32 and the model called only at
computed steps.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from planned_sampler import Batch, Halved, Sampler

from chitu_diffusion.bench.quality import bootstrap
from chitu_diffusion.evaluation.pictures import psnr
from chitu_diffusion.flexcache.constants import all_schedules
from chitu_diffusion.flexcache.planning import Plan, Setting, Tables, fitted, improve, plan, searched, weights
from chitu_diffusion.flexcache.schedule import growing, uniform

BENCH = Path(__file__).resolve().parent.parent
BUDGETS = {50: (25, 17, 10), 28: (14, 9, 6)}
SEEDS = (0, 1)
SEARCHED = 8
"""Calibration prompts that the search by true errors draws."""
HOLD, LINE, LEAST = (Setting(method, correct=False) for method in ("hold", "linear", "ridge"))


@dataclass(frozen=True)
class Study:
    """One number of steps: what was calibrated, and what is to be drawn."""

    sampler: Sampler
    steps: int
    tables: Tables
    parts: dict[str, Tables]
    tests: Batch
    searching: Batch
    found: dict[Setting, list[tuple[tuple[int, ...], float]]] = field(default_factory=dict)

    def schedules(self, setting: Setting) -> list[tuple[tuple[int, ...], float]]:
        """The exact search's schedule of every budget."""
        if setting not in self.found:
            self.found[setting] = searched(self.tables, setting)
        return self.found[setting]

    def searched(self, budget: int, setting: Setting, weights: Setting | None = None) -> Plan:
        """The exact search's schedule for `setting`, with the weights of another one if that is given."""
        return fitted(self.tables, self.schedules(setting)[budget - 1][0], weights or setting)


def rows(study: Study, budget: int, sweeps: int) -> Iterator[tuple[str, Callable[[], Plan | list[Plan]]]]:
    """Name -> the plan, or one for each test picture."""
    tables, steps = study.tables, study.steps
    for name, positions in (("uniform", uniform(budget, steps)), ("growing", growing(budget, steps))):
        yield f"{name}, hold", partial(fitted, tables, positions, HOLD)
        yield f"{name}, linear", partial(fitted, tables, positions, LINE)
    for name, entry in all_schedules().items():
        if entry["of"] == steps and len(entry["steps"]) == budget:
            yield f"{name}, hold", partial(fitted, tables, entry["steps"], HOLD)
    for setting in (HOLD, LINE, LEAST):
        flat = replace(setting, growth=0.0, response=0.0)
        yield f"planned, {setting.method}, unsigned", partial(fitted, tables, unsigned(tables, flat, budget), flat)
        yield f"planned, {setting.method}", partial(study.searched, budget, flat)
        yield f"planned, {setting.method}, growth", partial(study.searched, budget, setting)
    yield "planned, ridge of 3, growth", partial(study.searched, budget, LEAST, replace(LEAST, memory=3))
    full = Setting()
    for growth, response in ((0.0, 0.0), (4.0, 0.0), (4.0, 0.25), (4.0, 0.5), (4.0, 1.0), (8.0, 0.5), (2.0, 0.5)):
        priced = replace(full, growth=growth, response=response)
        yield f"+ correction, growth {growth:g}, response {response:g}", partial(study.searched, budget, priced)
    calm = replace(full, response=0.0)
    yield "+ correction, weights for no drift", partial(study.searched, budget, full, calm)
    yield "+ correction, pull 0.3", partial(study.searched, budget, replace(full, ridge=0.3))
    yield "+ correction, line instead of ridge", partial(study.searched, budget, Setting("linear"))
    yield "+ correction, each gap alone", partial(study.searched, budget, full, replace(full, undo=0.0))
    yield "+ correction of 4", partial(study.searched, budget, full, replace(full, memory=3))
    yield "uniform, corrected", partial(fitted, tables, uniform(budget, steps), full)
    yield "growing, corrected", partial(fitted, tables, growing(budget, steps), full)
    yield "+ the best of the candidates", partial(plan, tables, budget, full)
    if 4 <= budget < steps:
        for which, action in ((slice(-2, None), "conditional"), (slice(2, 4), "unconditional")):
            yield f"+ one step more, two by the {action} branch alone", partial(halved, study, budget, which, action)
    yield "+ local search on the prediction", partial(by_prediction, study, budget, full)
    if sweeps:
        yield "+ local search on true errors", partial(by_true_errors, study, budget, full, sweeps)
    yield "oracle: each picture's own weights", lambda: own(study, budget, full, schedule=False)
    yield "oracle: each picture's own schedule and weights", lambda: own(study, budget, full, schedule=True)


def halved(study: Study, budget: int, which: slice, action: str) -> Halved:
    """The plan of one step more, at two of whose steps only one branch is computed: as many FLOPs."""
    made = plan(study.tables, budget + 1)
    halves = made.steps[which]
    whole = [step for step in made.steps if step not in halves]
    pairs = {}
    for at in halves:
        history = [step for step in whole if step < at][:-3:-1]
        pairs[at] = tuple(zip(history, weights(study.parts[action].mean, history, at)))
    return Halved(made.steps, made.weights, actions=dict.fromkeys(halves, action), halves=pairs)


def unsigned(tables: Tables, setting: Setting, budget: int) -> tuple[int, ...]:
    """The schedule that is best if absolute errors are added up, as other planners do."""
    steps, gram = tables.steps, tables.mean
    costs = np.full((steps, steps, steps + 1), np.inf)
    for b in range(steps):
        for a in range(max(b, 1)):
            history = (b, a) if a < b else (b,)
            rows = -np.eye(steps)
            for at in range(b + 1, steps):
                rows[at, history] += weights(gram, history, at, setting.method, ridge=setting.ridge)
            lengths = np.sqrt(tables.sizes(rows[b + 1 :]).mean(0)) * abs(tables.deltas[b + 1 :])
            costs[a, b, b + 1 :] = np.concatenate([[0], lengths.cumsum()])
    return searched(tables, replace(setting, power=1.0), costs**2)[budget - 1][0]


def by_prediction(study: Study, budget: int, setting: Setting) -> Plan:
    """Local search by the predicted error."""
    refit = partial(fitted, study.tables, setting=setting)
    start = study.searched(budget, setting)
    return improve(start, lambda plans: [p.predicted for p in plans], refit, study.steps, sweeps=5)


def by_true_errors(study: Study, budget: int, setting: Setting, sweeps: int) -> Plan:
    """Local search by what really happens to the final latents of a few calibration prompts."""
    start = study.searched(budget, setting)

    def evaluate(plans: list[Plan]) -> list[float]:
        return [float(torch.log(study.sampler.errors(study.searching, p)).mean()) for p in plans]

    return improve(start, evaluate, partial(fitted, study.tables, setting=setting), study.steps, sweeps)


def own(study: Study, budget: int, setting: Setting, schedule: bool) -> list[Plan]:
    """For each test picture the plan that its own full run gives."""
    plans = []
    for number in range(len(study.tests.final)):
        tables = study.tests.tables(slice(number, number + 1))
        steps = searched(tables, setting)[budget - 1][0] if schedule else study.schedules(setting)[budget - 1][0]
        plans.append(fitted(tables, steps, setting))
    return plans


def measure(study: Study, made: Plan | list[Plan], groups: Sequence[int]) -> dict[str, Any]:
    """PSNR of the test pictures under one plan, or each under its own."""
    latents = study.sampler.run(study.tests, made)
    pictures = study.sampler.decode(latents)
    values = [min(psnr(one, other), 100.0) for one, other in zip(pictures, study.tests.pictures)]
    low, high = bootstrap(values, groups)
    first = made[0] if isinstance(made, list) else made
    return {
        "psnr": round(statistics.fmean(values), 2),
        "interval": [round(low, 2), round(high, 2)],
        "worst": round(min(values), 2),
        "latent_db": round(float(-10 * torch.log10(study.sampler.errors(study.tests, latents=latents)).mean()), 2),
        "predicted_db": None
        if isinstance(made, list) or not first.predicted
        else round(-20 * np.log10(first.predicted), 2),
        "steps": None if isinstance(made, list) else list(first.steps),
    }


def not_taken(calibration: Batch, budget: int) -> dict[str, float]:
    """Predicted final latent error in dB of ideas that do not pay, against the plan: radial bands, and guidance in two halves.

    *bands*: each of three bands of spatial frequency has weights of its own. *split*: the two branches of guidance have
    schedules of their own, at the best division of the same number of calls, each forecast from itself. Its two errors are taken
    for independent.
    """
    setting, tables = Setting(), calibration.tables()
    steps = searched(tables, setting)[budget - 1][0]
    joint = fitted(tables, steps, setting).predicted
    bands = [fitted(band, steps, setting).predicted for band in calibration.band_tables()]
    halves = [searched(half, setting) for half in calibration.branch_tables()]
    divisions = []
    for more in range(min(budget, tables.steps - budget)):
        pair = [
            fitted(half, found[b - 1][0], setting).predicted
            for half, found, b in zip(calibration.branch_tables(), halves, (budget + more, budget - more))
        ]
        divisions.append(float(np.hypot(*pair)))
    decibel = {"planned": joint, "bands": float(np.linalg.norm(bands)), "split": min(divisions)}
    return {name: round(-20 * float(np.log10(error)), 2) for name, error in decibel.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, help="calibration and test prompts; all of them if left out")
    parser.add_argument("--steps", type=int, nargs="+", default=list(BUDGETS))
    parser.add_argument("--sweeps", type=int, default=1, help="sweeps of the local search on true errors")
    parser.add_argument("--rows", help="only rows whose name has this in it")
    parser.add_argument("--output", type=Path, help="where to write the JSON")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sampler = Sampler(device)
    calibration = lines("calibration.txt")[: options.prompts]
    held_out = lines("flexcache.txt")[-24:][: options.prompts]
    seeds = SEEDS if options.prompts != 1 else SEEDS[:1]
    tests = [(prompt, seed) for prompt in held_out for seed in seeds]
    groups = [number for number in range(len(held_out)) for _ in seeds]
    result: dict[str, Any] = {
        "what": "planned cache, row by row, on the embedded model",
        "machine": torch.cuda.get_device_name() if device == "cuda" else platform.processor(),
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "commands": [" ".join(["python", *sys.argv])],
        "prompts": {"calibration": len(calibration), "test": len(held_out), "seeds": list(seeds)},
        "rows": [],
        "not_taken": [],
    }
    for steps in options.steps:
        start = time.perf_counter()
        recorded = sampler.record([(prompt, 100 + n) for n, prompt in enumerate(calibration)], steps)
        study = Study(
            sampler,
            steps,
            recorded.tables(),
            recorded.parts_tables(),
            sampler.record(tests, steps),
            recorded.some(range(min(SEARCHED, len(calibration)))),
        )
        print(f"recorded {steps} steps in {time.perf_counter() - start:.0f} s", flush=True)
        for budget in BUDGETS.get(steps, (steps // 2,)):
            ideas = not_taken(recorded, budget)
            result["not_taken"].append({"steps": steps, "budget": budget, **ideas})
            print(f"{budget} of {steps}: predicted dB {ideas}", flush=True)
            for name, make in rows(study, budget, options.sweeps):
                if options.rows and options.rows not in name:
                    continue
                start = time.perf_counter()
                row = measure(study, make(), groups)
                result["rows"].append({"name": name, "of": steps, "budget": budget, **row})
                print(
                    f"{budget:2d} of {steps}  {name:45s} {row['psnr']:6.2f} dB {row['interval']}, worst {row['worst']:6.2f}, "
                    f"latent {row['latent_db']:6.2f}, predicted {row['predicted_db']}  ({time.perf_counter() - start:.1f} s)",
                    flush=True,
                )
                if options.output:
                    options.output.parent.mkdir(parents=True, exist_ok=True)
                    options.output.write_text(json.dumps(result, indent=1) + "\n")


def lines(name: str) -> list[str]:
    return (BENCH / "prompts" / name).read_text(encoding="utf-8").splitlines()


if __name__ == "__main__":
    main()
