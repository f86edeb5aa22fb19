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

    def at(self, what: str) -> None:
        """What is being done: a case, and where in it."""
        self.bar.update(self._task, description=what)

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
