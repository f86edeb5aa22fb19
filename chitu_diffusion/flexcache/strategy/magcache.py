"""`magcache`: known ratios of residual magnitudes tell how far a held residual has drifted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from chitu_hooks import Call, HookMap, Refusal, Sites

from ..constants import find, missing, read
from ..params import MagCache
from .base import Strategy


class MagCacheStrategy(Strategy):
    """Accumulates |1 - product of ratios| over skipped steps.

    All branches go by the ratios of the first, so that they are held equally long: guidance takes their difference, and those
    of the two differ by less than 0.01 where they are published.
    """

    params: MagCache
    start: ClassVar[dict[str, Any]] = {"product": 1.0, "error": 0.0}

    def bind(self, sites: Sites, hook_map: HookMap) -> Refusal | None:
        if self.params.ratios is not None:
            self._lists: tuple[Sequence[float], ...] = (self.params.ratios,)
        else:
            file = self.params.constants
            found = find(sites, hook_map, self.name) if file is None else read(file, self.name, sites)
            if found is None:
                return missing(self.name, sites)
            self._lists = tuple(found["ratios"])
        return super().bind(sites, hook_map)

    def wants(self, call: Call) -> bool:
        memory, steps = self.memory(call.branch), call.generation.num_steps
        if steps is None or call.step.position < int(self.params.retention * steps + 0.5) or not call.branch.computed:
            return False
        memory.product *= self.ratio(call.step.position, steps)
        memory.error += abs(1.0 - memory.product)
        return memory.error < self.params.threshold

    def learn(self, call: Call) -> None:
        memory = self.memory(call.branch)
        memory.product, memory.error = 1.0, 0.0

    def ratio(self, position: int, steps: int) -> float:
        """The ratio at `position` of `steps`; the nearest one where the list is for another number of steps."""
        ratios = self._lists[0]
        if len(ratios) + 1 == steps:
            return ratios[position - 1]
        return (1.0, *ratios)[round(position * len(ratios) / max(steps - 1, 1))]

    @property
    def full_budget(self) -> bool:
        return self.params.threshold == 0
