"""``chitu bench flexcache``: every case against the baseline with the same prompt, seed, noise, dtype and scheduler.

First one picture is drawn from end to end. Then all cases are timed, in turns with their baseline, one picture a call. Then
every prompt and seed is drawn once with every case, watched, and compared. Each result is stored as soon as it is there.
"""

from __future__ import annotations

import time
from typing import Any

from chitu_diffusion.evaluation.perceptual import Distance

from .books import Books, Open, groups_of
from .cases import Case
from .errors import BenchError, one_line
from .kinds import KINDS
from .lab import Lab
from .meter import Meter
from .plan import Plan, baseline_case
from .quality import Drawn, compare, summarise
from .turns import summarise_turns, take_turns

SHEET = 8
"""Pictures of each case that are kept, for the contact sheet."""
TOGETHER, AT_LEAST = 8, 4
"""Cases that take turns with one another; they are stored when all of them are through. Each group has its baseline."""
GROUP_SECONDS = 180
"""Fewer than `TOGETHER` where that would take longer than this, but `AT_LEAST` so many."""


class Bench:
    """One bench on one loaded model. `share` is (this worker, number of workers) when drawing is shared."""

    def __init__(self, plan: Plan, share: tuple[int, int] = (0, 1)) -> None:
        self.begun = time.monotonic()
        self.plan = plan
        self.share = share
        self.lab = Lab(plan.task, plan.output)
        self.books = Books(plan, self.lab)
        self.results = self.books.results
        self.lpips: Distance | None = None
        self.pace = 0.0
        """Seconds a scheduler step of one picture without a cache, the least that was seen."""
        self.missing_seconds: float | None = None
        """What the work takes that no longer fitted into the plan's time."""

    # -- time ------------------------------------------------------------------------------------------------------

    @property
    def left(self) -> float:
        """Seconds."""
        return self.plan.seconds - (time.monotonic() - self.begun)

    def fits(self, steps: int) -> bool:
        """Whether so many scheduler steps of one picture can still be done, at the pace of the baseline."""
        if self.left >= steps * self.pace:
            return True
        self.missing_seconds = self.missing_seconds or steps * self.pace
        return False

    def together(self, steps: int) -> int:
        """How many cases of so many steps the next group is to have, besides the baseline; 0 if none fits."""
        one = steps * (self.plan.repeats + 1) * self.plan.timed
        if not self.fits(2 * one):
            return 0
        soon = max(AT_LEAST, int(GROUP_SECONDS / (one * self.pace)) - 1)
        return int(max(1, min(TOGETHER, soon, self.left / (one * self.pace) - 1)))

    def saw(self, steps: int, seconds: float) -> None:
        """So many steps of single pictures of the baseline took so long; the first picture of all may be slower."""
        self.pace = min(self.pace or float("inf"), seconds / steps)

    # -- the parts -------------------------------------------------------------------------------------------------

    def first_picture(self) -> None:
        """Draw one picture from end to end before anything long starts.

        Raises:
            BenchError: it cannot be drawn, or is one colour.
        """
        item, steps, began = self.plan.items[0], self.books.steps[0], time.monotonic()
        drawn, _ = self.lab.draw(baseline_case(steps), [item], 1, lambda first, count: None)
        if float(drawn.pictures.std()) < 1e-3:
            raise BenchError(
                f"the first picture, {item[0]!r} with seed {item[1]}, is of one colour; nothing was measured"
            )
        self.saw(steps, time.monotonic() - began)
        self.results.put_pictures("first", drawn.pictures)

    def time_all(self, meter: Meter) -> None:
        """Time every case that has not been timed, in turns with its baseline."""
        waiting = self.books.open_cases("timing")
        meter.begin("timing", len(waiting))
        for group in groups_of(waiting, self.together):
            self._time(group, meter)

    def _time(self, group: list[Open], meter: Meter) -> None:
        plan, steps = self.plan, group[0][0].steps
        prompts = [(prompt, plan.seeds[0]) for prompt in plan.task.prompts[: plan.timed]]
        cases = [baseline_case(steps), *(case for case, _ in group)]
        self.lab.prepare(cases[1])
        base_times, *others = take_turns(self.lab, cases, prompts, plan.repeats, meter)
        baseline = summarise_turns(base_times, base_times)
        self.saw(steps, baseline["seconds"]["end_to_end"]["least"])
        for (case, record), times in zip(group, others, strict=True):
            if isinstance(times, str):
                record["error"] = times
            else:
                record["timing"] = summarise_turns(times, base_times)
            self.results.put_case(record)
            meter.tell(f"{_timed(record)} {case.label}, {steps} steps")
        stored = self.books.baselines[steps]
        if stored["timing"] is None:
            stored["timing"] = baseline
            self.results.put_baseline(stored)

    def draw_baselines(self, meter: Meter) -> None:
        """Draw the baselines that cases still need and that are not stored."""
        waiting = self.books.open_cases("quality")
        for steps in self.books.steps:
            self.lab.prepare(baseline_case(steps))
            for batch in sorted({self.batch_of(case) for case, _ in waiting if case.steps == steps}):
                if not self.fits(steps * len(self.plan.items)):
                    return
                self.baseline_drawn(steps, batch, meter)

    def baseline_drawn(self, steps: int, batch: int, meter: Meter) -> Drawn:
        """The baseline's pictures, drawn with that batch size: kernels round otherwise with another."""
        record = self.books.baselines[steps]
        name = f"{record['id']}-{batch}"
        drawn = self.results.drawn(name)
        if drawn is None or record["took"] is None:
            meter.at(f"baseline, {steps} steps", len(self.plan.items))
            began = time.monotonic()
            drawn, took = self.lab.draw(baseline_case(steps), self.plan.items, batch, meter.drew)
            self.saw(steps * len(self.plan.items), time.monotonic() - began)
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
        waiting = sorted(self.books.open_cases("quality"), key=lambda entry: list(KINDS).index(entry[0].kind))
        mine = waiting[worker::workers]
        meter.begin("drawing", len(mine))
        for case, record in mine:
            if not self.fits(case.steps * len(self.plan.items)):
                return
            self._draw(case, record, meter)

    def _draw(self, case: Case, record: dict[str, Any], meter: Meter) -> None:
        batch, items = self.batch_of(case), self.plan.items
        baseline = self.baseline_drawn(case.steps, batch, meter)
        self.lab.prepare(case)
        meter.next(f"{case.label}, {case.steps} steps", len(items))
        before = meter.done
        try:
            drawn, took = self.lab.draw(case, items, batch, meter.drew)
            values = compare(drawn, baseline, self.lpips)
        except Exception as error:  # a case that fails is a result, and the next one runs
            record["error"] = one_line(error)
            self.results.put_case(record)
            meter.tell(f"failed ({record['error']}) {case.label}, {case.steps} steps")
            return
        finally:
            meter.advance(len(items) * case.steps - (meter.done - before))
        record["quality"] = {
            "metrics": summarise(values, [prompt for prompt, _ in items]),
            "batch": batch,
            **took,
            "flops_ratio": self._flops_ratio(took, case),
            "shown_psnr": [round(value, 2) for value in values["psnr"][: SHEET * len(self.plan.seeds)]],
            "samples": {name: [float(f"{v:.6g}") for v in numbers] for name, numbers in values.items()},
        }
        self.results.put_pictures(record["id"], drawn.pictures[: SHEET * len(self.plan.seeds)])
        self.results.put_case(record)
        meter.tell(f"drew {case.label}, {case.steps} steps: PSNR {record['quality']['metrics']['psnr']['mean']:.1f} dB")

    def _flops_ratio(self, took: dict[str, Any], case: Case) -> float | None:
        """The baseline's FLOPs over the case's."""
        full = (self.books.baselines[case.steps]["took"] or {}).get("flops")
        spent = took["flops"]
        return round(full / spent, 4) if isinstance(full, int) and isinstance(spent, int) and spent else None


def _timed(record: dict[str, Any]) -> str:
    timing = record["timing"]
    return f"failed ({record['error']})" if timing is None else f"timed {timing['speedup']['denoise']['median']:.2f}×"
