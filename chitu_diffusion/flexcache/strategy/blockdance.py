"""`blockdance`: in the later part of a run, start from the features in the middle of the trunk."""

from __future__ import annotations

from chitu_hooks import Call, HookMap, Refusal, Sites

from ..params import BlockDance
from .base import Strategy

SMALLEST = 1e-3
"""Distance of the boundary from either end, so that it is one."""


class BlockDanceStrategy(Strategy):
    """Reuses what the front blocks returned at the first step of a group, and computes the blocks behind them."""

    params: BlockDance
    reuses = "output"

    def bind(self, sites: Sites, hook_map: HookMap) -> Refusal | None:
        blocks = {d.name: sum(len(s.blocks) for s in d.stacks if not s.refiner) for d in sites.denoisers}
        few = [f"{name} {number}" for name, number in blocks.items() if number < 2]
        if few:
            return Refusal(
                f"a boundary is a place among the blocks of a trunk, at least 2 of them; found {', '.join(few)}",
                "use fbcache or static",
            )
        # A part and not a number: which of its stacks an inferred map can skip is known after the first call.
        self.back = 1 - min(max(self.params.boundary, SMALLEST), 1 - SMALLEST)
        return super().bind(sites, hook_map)

    def wants(self, call: Call) -> bool:
        steps, position = call.generation.num_steps, call.step.position
        if steps is None:
            return False
        first, stop = round(self.params.begin * steps), round(self.params.end * steps)
        return first <= position < stop and (position - first) % self.params.group != 0

    @property
    def full_budget(self) -> bool:
        return self.params.group == 1 or self.params.begin >= self.params.end
