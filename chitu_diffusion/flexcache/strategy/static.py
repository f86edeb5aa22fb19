"""`static`: a given list of computed steps."""

from __future__ import annotations

from chitu_hooks import Call, Generation

from ..params import Static
from .base import Strategy


class StaticStrategy(Strategy):
    """Computes the schedule positions in `Static.steps` and holds the residual over the others."""

    params: Static

    def __init__(self, params: Static) -> None:
        super().__init__(params)
        self._steps = frozenset(params.steps)

    def wants(self, call: Call) -> bool:
        return call.step.position not in self._steps

    def end(self, generation: Generation) -> None:
        beyond = [step for step in self.params.steps if generation.positions and step >= generation.positions]
        if beyond:
            generation.note(f"static: steps {beyond} never came, the generation had {generation.positions}")
        super().end(generation)
