"""``chitu bench flexcache``: every case against the baseline with the same prompt, seed, noise, dtype and scheduler.

First one picture is drawn from end to end. Then all cases are timed, in turns with their baseline, one picture a call. Then
every prompt and seed is drawn once with every case, watched, and compared. Each result is stored as soon as it is there.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

from chitu_diffusion.evaluation.perceptual import Distance

from .books import Books, Open, groups_of
from .errors import BenchError, one_line
from .kinds import KINDS
from .lab import Lab
from .meter import Meter
from .pace import Pace
from .parts import Piece, joined, parts_of, took_together
from .plan import Plan, baseline_case
from .quality import Drawn, compare, summarise
from .turns import Timed, flops_ratio, summarise_turns, take_turns

SHEET = 8
"""Pictures of each case that are kept, for the contact sheet."""
TOGETHER, AT_LEAST = 8, 4
"""Cases that take turns with one another; they are stored when all of them are through. Each group has its baseline."""
GROUP_SECONDS = 180
"""Fewer than `TOGETHER` where that would take longer than this, but `AT_LEAST` so many."""


class Bench:
    """One bench on one loaded model."""

    def __init__(self, plan: Plan) -> None:
        self.begun = time.monotonic()
        self.plan = plan
        self.lab = Lab(plan.task, plan.output)
        self.books = Books(plan, self.lab)
        self.results = self.books.results
        self.lpips: Distance | None = None
        self.pace = Pace()
        for steps, stored in self.books.baselines.items():
            if stored["timing"] is not None:
                self.pace.saw_alone(steps, stored["timing"]["seconds"]["end_to_end"]["least"])
        self.missing_seconds: float | None = None
        """What the work takes that no longer fitted into the plan's time."""

    # -- time ------------------------------------------------------------------------------------------------------

    @property
    def left(self) -> float:
        """Seconds."""
        return self.plan.seconds - (time.monotonic() - self.begun)

    def together(self, steps: int) -> int:
        """How many cases of so many steps the next group is to have, besides the baseline; 0 if none fits."""
        case = steps * (self.plan.repeats + 1) * self.plan.timed * self.pace.alone
        if self.left < 2 * case:
            self.missing_seconds = 2 * case
            return 0
        soon = max(AT_LEAST, int(GROUP_SECONDS / case) - 1)
        return int(max(1, min(TOGETHER, soon, self.left / case - 1)))

    def seconds_for(self, piece: Piece) -> float:
        """How long a piece of the drawing will take, with the others that are drawn beside it."""
        return piece.work * self.pace.of(piece.batch)

    def has_time_for(self, piece: Piece) -> bool:
        return self.left >= self.seconds_for(piece)

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
        self.pace.saw_alone(steps, time.monotonic() - began)
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
        alone, *others = take_turns(self.lab, cases, prompts, plan.repeats, meter)
        assert isinstance(alone, Timed)  # it raises where the baseline fails
        baseline = summarise_turns(alone, alone)
        self.pace.saw_alone(steps, baseline["seconds"]["end_to_end"]["least"])
        for (case, record), times in zip(group, others, strict=True):
            if isinstance(times, str):
                record["error"] = times
            else:
                record["timing"] = summarise_turns(times, alone)
            self.results.put_case(record)
            meter.tell(f"{_timed(record)} {case.label}, {steps} steps")
        stored = self.books.baselines[steps]
        if stored["timing"] is None:
            stored["timing"] = baseline
            self.results.put_baseline(stored)

    def measure_constants(self) -> None:
        """What the cases to be drawn need to have been measured on the model: once here, and not in every worker."""
        for case, _ in self.books.open_cases("quality"):
            with contextlib.suppress(Exception):  # the case itself says why there are none
                self.lab.measure(case)

    def pieces(self, workers: int) -> list[Piece]:
        """All that is to be drawn by `workers` together: parts of baselines, the slowest first, then cases."""
        waiting, pictures = self._waiting(), len(self.plan.items)
        parts: list[Piece] = []
        for steps, batch in self.books.open_baselines(case for case, _ in waiting):
            self.results.drop_parts(self.books.drawn_name(steps, batch))
            parts += parts_of(steps, batch, pictures, workers)
        parts.sort(key=lambda piece: (piece.batch, -piece.steps))
        return parts + [
            Piece(steps=case.steps, batch=self.books.batch_of(case), count=pictures, case=record["number"])
            for case, record in waiting
        ]

    def _waiting(self) -> list[Open]:
        """Cases to be drawn; those of one maker follow one another, since a peer's need a pipeline of their own."""
        return sorted(self.books.open_cases("quality"), key=lambda entry: list(KINDS).index(entry[0].kind))

    def draw_part(self, piece: Piece) -> dict[str, Any]:
        """Draw and store a part of a baseline; what it took."""
        self.lab.prepare(baseline_case(piece.steps))
        items = self.plan.items[piece.first : piece.first + piece.count]
        drawn, took = self.lab.draw(baseline_case(piece.steps), items, piece.batch, lambda first, count: None)
        self.results.put_drawn(self._part_name(piece), drawn)
        return took

    def join_baseline(self, parts: list[tuple[Piece, dict[str, Any]]]) -> None:
        """Put the parts of a baseline together, each with what it took, when all of them have been drawn."""
        parts = sorted(parts, key=lambda part: part[0].first)
        (steps, batch), names = parts[0][0].baseline, [self._part_name(piece) for piece, _ in parts]
        drawn = joined([found for name in names if (found := self.results.drawn(name)) is not None])
        assert len(drawn.pictures) == len(self.plan.items)
        self._put_baseline(steps, batch, drawn, took_together(parts))
        self.results.drop_parts(self.books.drawn_name(steps, batch))

    def _part_name(self, piece: Piece) -> str:
        return f"{self.books.drawn_name(*piece.baseline)}-from-{piece.first}"

    def _put_baseline(self, steps: int, batch: int, drawn: Drawn, took: dict[str, Any]) -> None:
        record = self.books.baselines[steps]
        self.results.put_drawn(self.books.drawn_name(steps, batch), drawn)
        self.results.put_pictures(record["id"], drawn.pictures[: SHEET * len(self.plan.seeds)])
        record["took"] = record["took"] or took
        self.results.put_baseline(record)

    def baseline_drawn(self, steps: int, batch: int, meter: Meter) -> Drawn:
        """The baseline's pictures, drawn with that batch size."""
        stored = self.results.drawn(self.books.drawn_name(steps, batch))
        if stored is not None and self.books.has_baseline(steps, batch):
            return stored
        self.lab.prepare(baseline_case(steps))
        meter.at(f"baseline, {steps} steps", len(self.plan.items))
        began = time.monotonic()
        drawn, took = self.lab.draw(baseline_case(steps), self.plan.items, batch, meter.drew)
        self.pace.saw_drawn(batch, steps * len(self.plan.items), time.monotonic() - began)
        self._put_baseline(steps, batch, drawn, took)
        meter.tell(f"drew the baseline, {steps} steps, {batch} a call")
        return drawn

    def draw_all(self, meter: Meter) -> None:
        """Draw and compare every case that has not been, here and one after the other."""
        pieces = self.pieces(1)
        meter.begin("drawing", sum(piece.case is not None for piece in pieces))
        for piece in pieces:
            if not self.has_time_for(piece):
                self.missing_seconds = self.seconds_for(piece)
                return
            if piece.case is None:
                self.baseline_drawn(*piece.baseline, meter)
                continue
            began = time.monotonic()
            meter.tell(self.draw_case(piece.case, meter))
            self.pace.saw_drawn(piece.batch, piece.work, time.monotonic() - began)

    def draw_case(self, number: int, meter: Meter) -> str:
        """Draw and compare a case of the plan, and store what came of it; a line that says so."""
        case = self.plan.cases[number]
        record = self.books.record(number, case)
        batch, items = self.books.batch_of(case), self.plan.items
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
            return f"failed ({record['error']}) {case.label}, {case.steps} steps"
        finally:
            meter.advance(len(items) * case.steps - (meter.done - before))
        record["quality"] = {
            "metrics": summarise(values, [prompt for prompt, _ in items]),
            "batch": batch,
            **took,
            "flops_ratio": flops_ratio(self.books.baselines[case.steps]["took"] or {}, took),
            "shown_psnr": [round(value, 2) for value in values["psnr"][: SHEET * len(self.plan.seeds)]],
            "samples": {name: [float(f"{v:.6g}") for v in numbers] for name, numbers in values.items()},
        }
        self.results.put_pictures(record["id"], drawn.pictures[: SHEET * len(self.plan.seeds)])
        self.results.put_case(record)
        return f"drew {case.label}, {case.steps} steps: PSNR {record['quality']['metrics']['psnr']['mean']:.1f} dB"


def _timed(record: dict[str, Any]) -> str:
    timing = record["timing"]
    return f"failed ({record['error']})" if timing is None else f"timed {timing['speedup']['denoise']['median']:.2f}×"
