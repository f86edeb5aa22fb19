"""`static`: a schedule of computed steps that is known before the run."""

from __future__ import annotations

from chitu_hooks import Call, Generation

from ..constants import published_schedule
from ..params import Scheduled, Static
from ..schedule import growing, stretched, uniform
from .base import Strategy

DAMPED = 0.5
"""Part of the line's rise, as in HiCache, https://arxiv.org/abs/2508.16984."""


class ScheduledStrategy(Strategy):
    """Computes the positions of a schedule; what happens at the others a subclass says."""

    params: Scheduled

    def __init__(self, params: Scheduled) -> None:
        super().__init__(params)
        named = isinstance(params.steps, str) and params.budget is None
        self._complete = False
        self._published = published_schedule(str(params.steps), self.name) if named else None

    def wants(self, call: Call) -> bool:
        return call.step.position not in self.computed(call.generation)

    def computed(self, generation: Generation) -> frozenset[int]:
        """The positions that the schedule computes in this generation."""
        memory, steps = generation.memory(self), generation.num_steps or 0
        if vars(memory).get("steps") != steps:
            memory.steps, memory.positions = steps, frozenset(self.positions(steps))
        return memory.positions

    def positions(self, steps: int) -> tuple[int, ...]:
        """The schedule for a run of `steps` steps."""
        if isinstance(self.params.steps, tuple):
            return self.params.steps
        if self._published is not None:
            of, positions = self._published
            return stretched(positions, of, steps)
        return (uniform if self.params.steps == "uniform" else growing)(self.params.budget or 0, steps)

    @property
    def full_budget(self) -> bool:
        return self._complete

    def end(self, generation: Generation) -> None:
        self._complete = set(range(generation.positions)) <= self.computed(generation)
        given = self.params.steps if isinstance(self.params.steps, tuple) else ()
        beyond = [step for step in given if generation.positions and step >= generation.positions]
        if beyond:
            generation.note(f"{self.name}: steps {beyond} never came, the generation had {generation.positions}")
        super().end(generation)


class StaticStrategy(ScheduledStrategy):
    """Holds or extrapolates the residual over the positions that are not computed."""

    def __init__(self, params: Static) -> None:
        super().__init__(params)
        self.order_of_forecast = 0 if params.forecast == "hold" else 1
        self.damping = DAMPED if params.forecast == "damped" else 1.0
