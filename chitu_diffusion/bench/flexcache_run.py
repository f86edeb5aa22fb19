"""A bench of caches from its plan to the end, with drawing shared by several processes where that is asked for."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from typing import Any

import torch

from chitu_diffusion.evaluation.perceptual import lpips_distance

from .errors import BenchError
from .flexcache import Bench
from .meter import Meter
from .plan import Plan

LOOK_SECONDS = 2
"""How often the process that waits for the others looks what they have stored."""


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
            bench.draw_baselines(meter)
            draw_shared(bench, meter, lpips)
    return bench


def draw_shared(bench: Bench, meter: Meter, lpips: bool) -> None:
    """`Bench.draw_all`, in as many processes as the plan says."""
    waiting = len(bench.books.open_cases("quality"))
    workers = min(bench.plan.workers, waiting)
    if workers < 2:
        bench.draw_all(meter)
        return
    import multiprocessing

    plan = dataclasses.replace(bench.plan, seconds=bench.left)
    context = multiprocessing.get_context("spawn")
    pace = bench.pace * workers  # they share one device: at worst each is slower by their number
    processes = [context.Process(target=_worker, args=(plan, n, workers, pace, lpips)) for n in range(workers)]
    for process in processes:
        process.start()
    meter.begin("drawing", waiting)
    each = bench.books.work() // waiting
    try:
        while any(process.is_alive() for process in processes):
            next(process for process in processes if process.is_alive()).join(LOOK_SECONDS)
            done = waiting - len(bench.books.open_cases("quality"))
            meter.finished(done, each)
    finally:
        for process in processes:
            process.terminate()
    if bench.books.open_cases("quality"):
        bench.missing_seconds = each * pace
    failed = [process.exitcode for process in processes if process.exitcode]
    if failed:
        raise BenchError(f"{len(failed)} of {workers} workers ended early; the same command continues")


def _worker(plan: Plan, worker: int, workers: int, pace: float, lpips: bool) -> None:
    from rich.console import Console

    console = Console(stderr=True, quiet=False, force_terminal=False)
    if torch.cuda.is_available():
        torch.cuda.set_device(worker % torch.cuda.device_count())  # what "cuda" means from here on
    torch.set_num_threads(max(1, torch.get_num_threads() // workers))
    bench = Bench(plan, (worker, workers))
    bench.pace = pace
    found = lpips_distance(lambda line: None) if lpips else ""
    bench.lpips = None if isinstance(found, str) else found
    with Meter(console, bench.books.work() // workers) as meter:
        bench.draw_all(meter)
