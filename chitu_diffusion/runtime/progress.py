"""A progress bar over the steps of a generation, with the calls that a cache has saved so far."""

from __future__ import annotations

from typing import Any

from chitu_hooks import Feature, Generation, Order, StepCall


class Progress(Feature):
    """Draws on `console` and removes itself at the end; a console that is no terminal is left alone.

    Args:
        console: a ``rich.console.Console``.
        label: what is being drawn.
    """

    name = "progress"
    exactness = "exact"
    order = Order.CLOCK

    def __init__(self, console: Any, label: str = "denoise") -> None:
        self.console = console
        self.label = label
        self.bar: Any = None
        self.task: Any = None

    def begin(self, generation: Generation) -> None:
        if not self.console.is_terminal:
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[hits]}"),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
        )
        self.task = self.bar.add_task(self.label, total=None, hits="")
        self.bar.start()

    def step_out(self, step: StepCall) -> None:
        if self.bar is None:
            return
        generation = step.generation
        hits = sum(branch.skipped + branch.replaced for branch in generation.branches)
        self.bar.update(
            self.task,
            total=generation.num_steps,
            completed=step.step.position + 1,
            hits=f"{hits} calls saved" if hits else "",
        )

    def end(self, generation: Generation) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
