"""`fbcache`: the first blocks tell whether the others are worth computing."""

from __future__ import annotations

from typing import Any, ClassVar

from chitu_hooks import Call, Streams

from ..distance import alike, main_stream, relative_l1
from ..params import FBCache
from .base import Strategy


class FBCacheStrategy(Strategy):
    """Compares what the front blocks add with what they added at the last computed step."""

    params: FBCache
    decides = "front_out"
    adaptive = True
    start: ClassVar[dict[str, Any]] = {"front": None, "seen": None}

    def __init__(self, params: FBCache) -> None:
        super().__init__(params)
        self.front, self.back = params.front, params.back
        self.order_of_forecast = params.order

    def front_out(self, call: Call, residual: Streams) -> None:
        memory = self.memory(call.branch)
        memory.seen = main_stream(residual)
        if self.decide(call):
            call.skip_trunk(self.forecast(call))

    def wants(self, call: Call) -> bool:
        memory = self.memory(call.branch)
        if not self.params.threshold or not call.can_skip or not alike(memory.seen, memory.front):
            return False
        return max(self.ratios(call, relative_l1(memory.seen, memory.front))) < self.params.threshold

    def learn(self, call: Call) -> None:
        memory = self.memory(call.branch)
        memory.front, memory.seen = memory.seen, None

    @property
    def full_budget(self) -> bool:
        return self.params.threshold == 0
