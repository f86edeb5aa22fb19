"""A bench of caches from its plan to the end, with drawing shared by several processes where that is asked for."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from chitu_diffusion.evaluation.perceptual import lpips_distance

from .errors import BenchError
from .flexcache import Bench
from .meter import Meter
from .parts import Piece
from .plan import Plan

if TYPE_CHECKING:
    from .crew import Crew


def run(plan: Plan, console: Any, lpips: bool = False) -> Bench:
    """Do what `plan` says, or what of it is not stored yet.

    Raises:
        BenchError: a results folder that cannot be used or written. What was measured before stays.
        ChituError: the model cannot be loaded, or the first picture cannot be drawn.
    """
    bench = Bench(plan)
    for record in bench.books.baselines.values():
        bench.results.put_baseline(record)
    if lpips:
        found = lpips_distance(lambda line: console.print(line, highlight=False))
        if isinstance(found, str):
            console.print(found, highlight=False)
        else:
            bench.lpips = found
    if find_spec("skimage") is None:
        console.print("SSIM is left out: scikit-image is not installed; the eval extra brings it", highlight=False)
    with Meter(console, bench.books.work()) as meter:
        if bench.books.open_cases("timing") or bench.books.open_cases("quality"):
            meter.at("first picture")
            bench.first_picture()
        bench.time_all(meter)
        if bench.missing_seconds is None:
            draw(bench, meter, lpips)
    if bench.lab.stale:
        again = ", ".join(bench.lab.stale)
        console.print(
            f"measured again, since it was of another format or model: {len(bench.lab.stale)} of the results folder's files, "
            f"{again}",
            highlight=False,
        )
    return bench


def draw(bench: Bench, meter: Meter, lpips: bool) -> None:
    """Draw and compare all that has not been, in as many processes as the plan says.

    Raises:
        BenchError: a process ended early, or a result cannot be written. What was measured before stays.
    """
    pieces = bench.pieces(bench.plan.workers)
    workers = min(bench.plan.workers, len(pieces))
    if workers < 2:
        bench.draw_all(meter)
        return
    from .crew import Crew

    bench.measure_constants()
    meter.begin("drawing", sum(piece.case is not None for piece in pieces))
    with Crew(bench.plan, workers, lpips) as crew:
        draw_shared(bench, meter, crew, pieces)
        ended = crew.ended
    if ended:
        raise BenchError(f"{ended} of {workers} workers ended early; the same command continues")


def draw_shared(bench: Bench, meter: Meter, crew: Crew, pieces: list[Piece]) -> None:
    """Hand out `pieces` as long as they fit; a case waits for the baseline that it is compared with."""
    parts: dict[tuple[int, int], list[tuple[Piece, dict[str, Any]]]] = {}
    while True:
        for worker in crew.idle:
            ready = (piece for piece in pieces if piece.case is None or bench.books.has_baseline(*piece.baseline))
            piece = next((piece for piece in ready if bench.has_time_for(piece)), None)
            if piece is None:
                break
            pieces.remove(piece)
            crew.give(worker, piece)
        if not crew.busy:
            break
        for answer in crew.answers():
            piece = answer.piece
            bench.pace.saw_drawn(piece.batch, piece.work, answer.seconds, first=answer.first)
            meter.finished(piece.work, case=piece.case is not None)
            if answer.told:
                meter.tell(answer.told)
            if answer.took is not None:
                drawn = parts.setdefault(piece.baseline, [])
                drawn.append((piece, answer.took))
                if sum(part.count for part, _ in drawn) == len(bench.plan.items):
                    bench.join_baseline(drawn)
                    meter.tell(f"drew the baseline, {piece.steps} steps, {piece.batch} a call")
    if pieces and not crew.ended:
        bench.missing_seconds = min(bench.seconds_for(piece) for piece in pieces)
