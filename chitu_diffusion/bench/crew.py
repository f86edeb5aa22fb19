"""Several processes that draw at once, each with the model. One at a time is handed to whoever is idle."""

from __future__ import annotations

import io
import multiprocessing
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import diffusers
import torch
import transformers

from chitu_diffusion.evaluation.perceptual import lpips_distance
from chitu_hooks import ChituError

from .errors import BenchError
from .files import drop_halves
from .flexcache import Bench
from .meter import Meter
from .parts import Piece
from .plan import Plan

PATIENCE = 10
"""Seconds that a process has to end by itself."""


@dataclass(frozen=True)
class Answer:
    """What a worker says of a piece."""

    piece: Piece
    seconds: float
    first: bool
    """Whether it was the first that it drew: kernels were loaded meanwhile."""
    told: str = ""
    took: dict[str, Any] | None = None
    """Of a part of a baseline, see `Lab.draw`."""
    error: str | None = None
    """Why nothing more can be done, on a full disk for example."""


@dataclass(eq=False)
class Worker:
    """A process, and what it is at."""

    process: Any
    connection: Connection
    piece: Piece | None = None
    ended: bool = False


class Crew:
    """`count` workers; a context manager, at whose end none of them is left.

    Args:
        plan: theirs too. A worker does what it is handed and looks at no time.
    """

    def __init__(self, plan: Plan, count: int, lpips: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self.folder = plan.output
        self.workers: list[Worker] = []
        # They inherit the mask: Ctrl-C, which a terminal sends to all, is for this process, and it ends them.
        former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for number in range(count):
                here, there = context.Pipe()
                process = context.Process(target=work, args=(there, plan, number, count, lpips), daemon=True)
                process.start()
                there.close()  # so that its end is seen when the process ends
                self.workers.append(Worker(process, here))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, former)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        for worker in self.workers:
            worker.connection.close()  # which ends one that waits
            if kind is not None:
                worker.process.terminate()
        until = time.monotonic() + PATIENCE
        for worker in self.workers:
            worker.process.join(max(0.0, until - time.monotonic()))
            worker.process.kill()
            worker.process.join()
            drop_halves(self.folder, worker.process.pid)

    @property
    def idle(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.piece is None and not worker.ended]

    @property
    def busy(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.piece is not None]

    @property
    def ended(self) -> int:
        """How many have ended before they were to."""
        return sum(worker.ended for worker in self.workers)

    def give(self, worker: Worker, piece: Piece) -> None:
        worker.piece = piece
        try:
            worker.connection.send(piece)
        except OSError:
            worker.piece, worker.ended = None, True

    def answers(self) -> Iterator[Answer]:
        """Wait until a busy worker is through, or has ended; what those say that are.

        Raises:
            BenchError: nothing more can be done.
        """
        at = {worker.connection: worker for worker in self.busy}
        for connection in wait(list(at)):
            worker = at[connection]  # type: ignore[index]
            worker.piece = None
            try:
                answer = worker.connection.recv()
            except (EOFError, OSError):
                worker.ended = True
                continue
            if answer.error is not None:
                raise BenchError(answer.error)
            yield answer


def work(connection: Connection, plan: Plan, number: int, count: int, lpips: bool) -> None:
    """The life of worker `number` of `count`."""
    from rich.console import Console

    if torch.cuda.is_available():
        torch.cuda.set_device(number % torch.cuda.device_count())  # what "cuda" means from here on
    torch.set_num_threads(max(1, torch.get_num_threads() // count))
    for library in (diffusers, transformers):  # several bars in one terminal
        library.utils.logging.disable_progress_bar()
    bench = Bench(plan)
    found = lpips_distance(lambda line: None) if lpips else ""
    bench.lpips = None if isinstance(found, str) else found
    meter = Meter(Console(file=io.StringIO()), 1)
    first = True
    try:
        while True:
            connection.send(_done(bench, connection.recv(), meter, first))
            first = False
    except (EOFError, BrokenPipeError):
        return


def _done(bench: Bench, piece: Piece, meter: Meter, first: bool) -> Answer:
    began = time.monotonic()
    took, told, error = None, "", None
    try:
        if piece.case is None:
            took = bench.draw_part(piece)
        else:
            told = bench.draw_case(piece.case, meter)
    except ChituError as problem:
        error = str(problem)
    return Answer(piece, time.monotonic() - began, first, told, took, error)
