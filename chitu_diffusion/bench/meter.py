"""How far a bench is, and how long it will still take."""

from __future__ import annotations

import time
from typing import Any


class Meter:
    """A bar on a terminal, a line for each finished case elsewhere. Work is counted in scheduler steps of one picture.

    Args:
        console: a ``rich.console.Console``.
        total: all of the work.
    """

    def __init__(self, console: Any, total: int) -> None:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        self.console = console
        self.total = max(total, 1)
        self.done = 0
        self.begun = time.monotonic()
        self.part, self.cases, self.case = "", 0, 0
        self.what, self.pictures = "", 0
        self._first, self._step = -1, 0
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self.bar.add_task("", total=self.total)

    def __enter__(self) -> Meter:
        self.bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()

    def expect(self, total: int) -> None:
        """All of the work, where it is known later."""
        self.total = max(total, 1)
        self.bar.update(self._task, total=self.total)

    def begin(self, part: str, cases: int) -> None:
        """A part of the bench begins, with so many cases."""
        self.part, self.cases, self.case = part, cases, 0

    def next(self, what: str, pictures: int = 0) -> None:
        """The next case."""
        self.case += 1
        self.at(f"{self.part}, case {self.case} of {self.cases}: {what}", pictures)

    def at(self, what: str, pictures: int = 0) -> None:
        """What is being done, and of how many pictures it is."""
        self.what, self.pictures, self._first = what, pictures, -1
        self.bar.update(self._task, description=what)

    def drew(self, first: int, count: int) -> None:
        """One more scheduler step of `count` pictures, from number `first`."""
        self._step = 1 if first != self._first else self._step + 1
        self._first = first
        picture = f"{first + 1}" if count == 1 else f"{first + 1}–{first + count}"
        self.bar.update(
            self._task, description=f"{self.what} · picture {picture} of {self.pictures} · step {self._step}"
        )
        self.advance(count)

    def finished(self, steps: int, *, case: bool) -> None:
        """Another process has finished so much work; whether it was a case of this part."""
        self.advance(steps)
        self.case += case
        self.bar.update(self._task, description=f"{self.part}, {self.case} of {self.cases} cases")

    def advance(self, steps: int) -> None:
        self.done += steps
        self.bar.update(self._task, completed=min(self.done, self.total))

    def tell(self, line: str) -> None:
        """A line that stays, with the time that is left."""
        self.console.print(f"{line} · {self.left()}", highlight=False, markup=False)

    def left(self) -> str:
        """The time that is left, if the rest goes as the work so far."""
        if not self.done:
            return "time left not known yet"
        seconds = (time.monotonic() - self.begun) * max(self.total - self.done, 0) / self.done
        return f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {seconds:.0f} s left"
