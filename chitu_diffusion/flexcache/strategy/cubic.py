"""`cubic`: tokens of calm regions are frozen for some steps, and only the others are computed."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from chitu_hooks import Call

from ..params import Cubic
from ..regions import distances, places_above, score
from .tokens import TokenStrategy


class CubicStrategy(TokenStrategy):
    """Sorts the tokens once, after `warmup`; then each step computes all, those that are not static, or the active ones."""

    params: Cubic
    adaptive = True
    start: ClassVar[dict[str, Any]] = {**TokenStrategy.start, "seen": (), "sorted": None, "full": 0, "medium": 0}

    def watch(self, call: Call, image: Tensor) -> None:
        memory = self.memory(call.branch)
        if memory.sorted is None and not call.step.stage:
            memory.seen += (distances(image, self.params.region),)

    def wants(self, call: Call) -> bool:
        memory, position = self.memory(call.branch), call.step.position
        if memory.sorted is None:
            if len(memory.seen) < max(2, self.params.warmup):
                return False
            memory.sorted, memory.seen = self._sort(call, memory.seen, memory.residual), ()
        if position - memory.full >= self.params.static_interval:
            return False
        medium = position - memory.medium >= self.params.medium_interval
        memory.medium = position if medium else memory.medium
        memory.places = memory.sorted[0 if medium else 1]
        return memory.places is not None

    def _sort(self, call: Call, seen: tuple[Tensor, ...], like: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Places of the tokens that are not static, and of the active ones; None where that is all. Waits for the device once."""
        params, scores = self.params, score(seen).cpu()
        if not bool(scores.isfinite().all()):
            call.generation.note(
                f"{self.name}: {call.branch.name} was computed, since no region could be told from another"
            )
            return None, None
        places = (
            places_above(scores, threshold, params.region, like.shape[1])
            for threshold in (min(params.static, params.medium), params.medium)
        )
        not_static, active = (None if found is None else found.to(like.device) for found in places)
        return not_static, active

    def learn(self, call: Call) -> None:
        super().learn(call)
        memory = self.memory(call.branch)
        memory.full = memory.medium = call.step.position

    @property
    def full_budget(self) -> bool:
        return self.params.medium == 0 or self.params.static_interval == 1
