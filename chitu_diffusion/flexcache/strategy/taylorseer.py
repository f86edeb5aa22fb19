"""`taylorseer`: a fixed cadence of computed steps, and a Taylor forecast between them."""

from __future__ import annotations

from typing import Any, ClassVar

from chitu_hooks import Call, Streams

from ..distance import copied
from ..forecast import extrapolate, updated
from ..params import TaylorSeer
from ..schedule import ramped
from .base import Strategy


class TaylorSeerStrategy(Strategy):
    """Forecasts what the trunk adds to its input."""

    params: TaylorSeer

    def __init__(self, params: TaylorSeer) -> None:
        super().__init__(params)
        self.order_of_forecast, self.damping = params.order, params.damping

    def wants(self, call: Call) -> bool:
        params, position = self.params, call.step.position
        if params.ramp:
            return not ramped(position, params.warmup, params.interval)
        return (position - params.warmup + 1) % params.interval != 0

    @property
    def full_budget(self) -> bool:
        return self.params.interval == 1


class OnFeature(TaylorSeerStrategy):
    """Forecasts what leaves the trunk, whatever went in."""

    start: ClassVar[dict[str, Any]] = {"features": (), "at": -1}

    def __init__(self, params: TaylorSeer) -> None:
        super().__init__(params)
        self.order_of_forecast = 0  # the residuals are only held: they stand in where no feature was seen yet

    def trunk_out(self, call: Call, streams: Streams) -> Streams | None:
        if self.learning(call):
            return None
        memory, index = self.memory(call.branch), call.step.index
        if call.skipping:
            return extrapolate(memory.features, index - memory.at, self.damping)[0] if memory.features else None
        feature = {role: None if tensor is None else copied(tensor) for role, tensor in streams.items()}
        memory.features = updated(memory.features, {0: feature}, index - memory.at, self.params.order)
        memory.at = index
        return None


def taylorseer(params: TaylorSeer) -> Strategy:
    """The strategy that forecasts what ``params.of`` says."""
    return (OnFeature if params.of == "feature" else TaylorSeerStrategy)(params)
