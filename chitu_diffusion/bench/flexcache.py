"""``chitu bench flexcache``: every case against the baseline with the same prompt, seed, noise, dtype and scheduler.

First one picture is drawn from end to end. Then all cases are timed, in turns with their baseline, one picture a call. Then
every prompt and seed is drawn once with every case, watched, and compared. Each result is stored as soon as it is there.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from chitu_diffusion.evaluation.perceptual import Distance, lpips_distance
from chitu_diffusion.runtime import DiffusionTask

from .cases import Case
from .errors import BenchError, one_line
from .kinds import KINDS, PEERS
from .lab import Item, Lab
from .meter import Meter
from .quality import Drawn, compare, summarise
from .results import FORMAT, Results, code_digest, content_id, model_digest
from .timing import circumstances
from .turns import summarise_turns, take_turns

SHEET = 8
"""Pictures of each case that are kept, for the contact sheet."""
TOGETHER = 8
"""Cases that take turns with one another; they are stored when all of them are through."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a bench is to do."""

    task: DiffusionTask
    """Model, prompts, size, guidance, dtype and device; its steps are those of the cases."""
    seeds: tuple[int, ...]
    cases: tuple[Case, ...]
    output: Path
    batch: int = 1
    """Pictures drawn in one call where a case allows it; timing is always of one picture."""
    repeats: int = 3
    """Timed calls of each case and prompt, after one that is dropped."""
    timed: int = 1
    """Prompts that are timed, from the first."""
    workers: int = 1
    """Processes that draw; timing is always done alone."""
    seconds: float = float("inf")
    """Stop between two cases once so much time has gone by."""
    run: int = field(default_factory=time.time_ns)
    """Number of this run: a case that failed in it is tried again in the next one only."""

    @property
    def items(self) -> list[Item]:
        return [(prompt, seed) for prompt in self.task.prompts for seed in self.seeds]


class Bench:
    """One bench on one loaded model. `share` is (this worker, number of workers) when drawing is shared."""

    def __init__(self, plan: Plan, console: Any, share: tuple[int, int] = (0, 1)) -> None:
        self.plan = plan
        self.console = console
        self.share = share
        self.begun = time.monotonic()
        self.results = Results(plan.output)
        self.lab = Lab(plan.task, plan.output)
        self.circumstances = circumstances(torch.device(self.lab.device))
        self.code = code_digest()
        self.steps = sorted({case.steps for case in plan.cases})
        self.baselines = {steps: self._baseline(steps) for steps in self.steps}
        self.lpips: Distance | None = None

    # -- what is to be done ----------------------------------------------------------------------------------------

    def _baseline(self, steps: int) -> dict[str, Any]:
        """The record of the baseline with so many steps, from the folder if it is there."""
        content = {**self.content, "steps": steps}
        name = content_id(content)
        stored = self.results.baseline(name)
        return stored or {
            "format": FORMAT,
            "id": name,
            "content": content,
            "prompts": list(self.plan.task.prompts),
            "arguments": self.lab.plan(steps).to_json()["arguments"],
            **self.circumstances,
            "took": None,
            "timing": None,
        }

    @property
    def content(self) -> dict[str, Any]:
        """Everything that the baseline's pictures and times depend on, besides the number of steps."""
        pipe, task = self.lab.pipe, self.plan.task
        source = self.lab.source
        scheduler = pipe.scheduler
        found = self.circumstances
        return {
            "model": model_digest(source) if isinstance(source, Path) else source,
            "name": "embedded" if task.model is None else Path(task.model).name,
            "pipeline": type(pipe).__name__,
            "scheduler": [type(scheduler).__name__, {k: repr(v) for k, v in sorted(scheduler.config.items())}],
            "dtype": str(pipe.dtype).removeprefix("torch."),
            "device": torch.device(self.lab.device).type,
            "guidance": task.guidance,
            "size": [task.height, task.width, task.num_frames],
            "negative_prompt": task.negative_prompt,
            "arguments": dict(task.arguments),
            "prompts": content_id(list(task.prompts)),
            "pictures": len(self.plan.items),
            "seeds": list(self.plan.seeds),
            "machine": found["machine"],
            "versions": {k: v for k, v in found["versions"].items() if k in ("torch", "diffusers", "transformers")},
        }

    def record(self, number: int, case: Case) -> dict[str, Any]:
        """The record of a case as far as it has been measured; a case that failed is tried again."""
        content: dict[str, Any] = {"case": case.content(), "baseline": self.baselines[case.steps]["id"]}
        kind = KINDS[case.kind]
        if case.kind == "chitu":
            content["code"] = self.code
        elif kind.package is not None:
            content["package"] = _version(kind.package)
        name = content_id(content)
        stored = self.results.case(name)
        fresh = {"quality": None, "timing": None, "error": None}
        keep = stored is not None and (stored["error"] is None or stored["run"] == self.plan.run)
        found = stored if stored is not None and keep else fresh
        return {
            "format": FORMAT,
            "id": name,
            "number": number,
            "run": self.plan.run,
            "baseline": content["baseline"],
            "case": case.to_json(),
            **{key: found[key] for key in fresh},
            **({key: found[key] for key in self.circumstances} if found is not fresh else self.circumstances),
        }

    def open_cases(self, part: str) -> list[tuple[Case, dict[str, Any]]]:
        """Cases that lack `part`, `quality` or `timing`."""
        found = []
        for number, case in enumerate(self.plan.cases):
            record = self.record(number, case)
            missing = KINDS[case.kind].missing()
            if missing is not None:
                record["error"] = missing
                self.results.put_case(record)
            elif record["error"] is None and record[part] is None:
                found.append((case, record))
        return found

    @property
    def out_of_time(self) -> bool:
        return time.monotonic() - self.begun > self.plan.seconds

    # -- the parts -------------------------------------------------------------------------------------------------

    def first_picture(self) -> None:
        """Draw one picture from end to end before anything long starts.

        Raises:
            BenchError: it cannot be drawn, or is one colour.
        """
        item = self.plan.items[0]
        drawn, _ = self.lab.draw(baseline_case(self.steps[0]), [item], 1, lambda size: None)
        if float(drawn.pictures.std()) < 1e-3:
            raise BenchError(
                f"the first picture, {item[0]!r} with seed {item[1]}, is of one colour; nothing was measured"
            )
        self.results.put_pictures("first", drawn.pictures)

    def time_all(self, meter: Meter) -> None:
        """Time every case that has not been timed, in turns with its baseline."""
        plan = self.plan
        waiting = self.open_cases("timing")
        prompts = [(prompt, plan.seeds[0]) for prompt in plan.task.prompts[: plan.timed]]
        for group in groups_of(waiting):
            if self.out_of_time:
                return
            steps = group[0][0].steps
            cases = [baseline_case(steps), *(case for case, _ in group)]
            self.lab.prepare(cases[1])
            base_times, *others = take_turns(self.lab, cases, prompts, plan.repeats, meter)
            for (case, record), times in zip(group, others, strict=True):
                if isinstance(times, str):
                    record["error"] = times
                else:
                    record["timing"] = summarise_turns(times, base_times)
                self.results.put_case(record)
                meter.tell(f"{_timed(record)} {case.label}, {steps} steps")
            if self.baselines[steps]["timing"] is None:
                self.baselines[steps]["timing"] = summarise_turns(base_times, base_times)
                self.results.put_baseline(self.baselines[steps])

    def draw_baselines(self, meter: Meter) -> None:
        """Draw the baselines that cases still need and that are not stored."""
        waiting = self.open_cases("quality")
        for steps in self.steps:
            self.lab.prepare(baseline_case(steps))
            for batch in sorted({self.batch_of(case) for case, _ in waiting if case.steps == steps}):
                self.baseline_drawn(steps, batch, meter)

    def baseline_drawn(self, steps: int, batch: int, meter: Meter) -> Drawn:
        """The baseline's pictures, drawn with that batch size: kernels round otherwise with another."""
        record = self.baselines[steps]
        name = f"{record['id']}-{batch}"
        drawn = self.results.drawn(name)
        if drawn is None or record["took"] is None:
            meter.at(f"baseline, {steps} steps")
            drawn, took = self.lab.draw(baseline_case(steps), self.plan.items, batch, meter.advance)
            self.results.put_drawn(name, drawn)
            self.results.put_pictures(record["id"], drawn.pictures[: SHEET * len(self.plan.seeds)])
            record["took"] = record["took"] or took
            self.results.put_baseline(record)
            meter.tell(f"drew the baseline, {steps} steps, {batch} a call")
        return drawn

    def batch_of(self, case: Case) -> int:
        """Pictures a call: one where a decision about one picture would depend on the others."""
        return 1 if KINDS[case.kind].coupled(case) else min(self.plan.batch, len(self.plan.items))

    def draw_all(self, meter: Meter) -> None:
        """Draw and compare every case that has not been, of this worker's share."""
        worker, workers = self.share
        waiting = sorted(self.open_cases("quality"), key=lambda entry: list(KINDS).index(entry[0].kind))
        for case, record in waiting[worker::workers]:
            if self.out_of_time:
                return
            batch = self.batch_of(case)
            meter.at(f"{case.label}, {case.steps} steps")
            baseline = self.baseline_drawn(case.steps, batch, meter)
            self.lab.prepare(case)
            before = meter.done
            try:
                drawn, took = self.lab.draw(case, self.plan.items, batch, meter.advance)
                values = compare(drawn, baseline, self.lpips)
            except Exception as error:  # a case that fails is a result, and the next one runs
                record["error"] = one_line(error)
                self.results.put_case(record)
                meter.tell(f"failed ({record['error']}) {case.label}, {case.steps} steps")
                continue
            finally:
                meter.advance(len(self.plan.items) * case.steps - (meter.done - before))
            record["quality"] = {
                "metrics": summarise(values, [prompt for prompt, _ in self.plan.items]),
                "batch": batch,
                **took,
                "flops_ratio": self._flops_ratio(took, case),
                "shown_psnr": [round(value, 2) for value in values["psnr"][: SHEET * len(self.plan.seeds)]],
                "samples": {name: [float(f"{v:.6g}") for v in numbers] for name, numbers in values.items()},
            }
            self.results.put_pictures(record["id"], drawn.pictures[: SHEET * len(self.plan.seeds)])
            self.results.put_case(record)
            meter.tell(
                f"drew {case.label}, {case.steps} steps: PSNR {record['quality']['metrics']['psnr']['mean']:.1f} dB"
            )

    def _flops_ratio(self, took: dict[str, Any], case: Case) -> float | None:
        """The baseline's FLOPs over the case's."""
        full = (self.baselines[case.steps]["took"] or {}).get("flops")
        spent = took["flops"]
        return round(full / spent, 4) if isinstance(full, int) and isinstance(spent, int) and spent else None

    def work(self) -> int:
        """Scheduler steps of single pictures that are to be done, in this process."""
        turns = (self.plan.repeats + 1) * self.plan.timed
        timed = sum(case.steps * turns for case, _ in self.open_cases("timing"))
        timed += sum(steps * turns for steps in self.steps)
        drawn = sum(case.steps for case, _ in self.open_cases("quality")) + sum(self.steps)
        return timed + drawn * len(self.plan.items)


def run(plan: Plan, console: Any, lpips: bool = False) -> Bench:
    """Do what `plan` says, or what of it is not stored yet.

    Raises:
        BenchError: a results folder that cannot be used or written. What was measured before stays.
        ChituError: the model cannot be loaded, or the first picture cannot be drawn.
    """
    bench = Bench(plan, console)
    for record in bench.baselines.values():
        bench.results.put_baseline(record)
    if lpips:
        found = lpips_distance(lambda line: console.print(line, highlight=False))
        if isinstance(found, str):
            console.print(found, highlight=False)
        else:
            bench.lpips = found
    if find_spec("skimage") is None:
        console.print("SSIM is left out: scikit-image is not installed; the eval extra brings it", highlight=False)
    with Meter(console, bench.work()) as meter:
        if bench.open_cases("timing") or bench.open_cases("quality"):
            meter.at("first picture")
            bench.first_picture()
        bench.time_all(meter)
        if not bench.out_of_time:
            bench.draw_baselines(meter)
            draw_shared(bench, meter, lpips)
    return bench


def draw_shared(bench: Bench, meter: Meter, lpips: bool) -> None:
    """`Bench.draw_all`, in as many processes as the plan says."""
    workers = min(bench.plan.workers, len(bench.open_cases("quality")))
    if workers < 2:
        bench.draw_all(meter)
        return
    import multiprocessing

    plan = dataclasses.replace(bench.plan, seconds=bench.plan.seconds - (time.monotonic() - bench.begun))
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_worker, args=(plan, n, workers, lpips)) for n in range(workers)]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join()
    finally:
        for process in processes:
            process.terminate()
    failed = [process.exitcode for process in processes if process.exitcode]
    if failed:
        raise BenchError(f"{len(failed)} of {workers} workers ended early; the same command continues")


def _worker(plan: Plan, worker: int, workers: int, lpips: bool) -> None:
    from rich.console import Console

    console = Console(stderr=True, quiet=False, force_terminal=False)
    torch.set_num_threads(max(1, torch.get_num_threads() // workers))
    bench = Bench(plan, console, (worker, workers))
    found = lpips_distance(lambda line: None) if lpips else ""
    bench.lpips = None if isinstance(found, str) else found
    with Meter(console, bench.work() // workers) as meter:
        bench.draw_all(meter)


def groups_of(waiting: list[tuple[Case, dict[str, Any]]]) -> Iterator[list[tuple[Case, dict[str, Any]]]]:
    """Cases that take turns: of one number of steps and one maker, at most `TOGETHER`."""
    makers = {kind: kind if kind in PEERS else "" for kind in KINDS}
    ordered = sorted(waiting, key=lambda entry: (list(KINDS).index(entry[0].kind), entry[0].steps))
    by_turn: dict[tuple[str, int], list[tuple[Case, dict[str, Any]]]] = {}
    for entry in ordered:
        by_turn.setdefault((makers[entry[0].kind], entry[0].steps), []).append(entry)
    for group in by_turn.values():
        yield from (group[start : start + TOGETHER] for start in range(0, len(group), TOGETHER))


def baseline_case(steps: int) -> Case:
    return Case(kind="baseline", use="", steps=steps, family="baseline")


def _timed(record: dict[str, Any]) -> str:
    timing = record["timing"]
    return f"failed ({record['error']})" if timing is None else f"timed {timing['speedup']['denoise']['median']:.2f}×"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
