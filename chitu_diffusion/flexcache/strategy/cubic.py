"""`cubic`: tokens of calm regions are frozen for some steps, and only the others are computed."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from chitu_hooks import Call

from ..params import Cubic
from ..regions import distances, places_above, score
from .static import DAMPED
from .tokens import TokenStrategy


class CubicStrategy(TokenStrategy):
    """Sorts the tokens once, after `warmup`; then each step computes all, those that are not static, the active ones, or none.

    All branches of a denoiser go by the tokens of the first: guidance takes their difference, and blows up that of a token that
    is held in one and not in the other.
    """

    params: Cubic
    adaptive = True
    damping = DAMPED
    start: ClassVar[dict[str, Any]] = {
        **TokenStrategy.start,
        "tokens": 0,
        "seen": (),
        "sorted": None,
        "full": 0,
        "medium": 0,
        "active": 0,
    }

    def watch(self, call: Call, image: Tensor) -> None:
        memory, tokens = self.memory(call.branch), image.shape[1]
        if memory.tokens != tokens:  # a callback may give the picture another size midway
            memory.tokens, memory.seen, memory.sorted = tokens, (), None
        if memory.sorted is None and not call.step.stage:
            memory.seen += (distances(image, self.params.region),)

    def wants(self, call: Call) -> bool:
        params, memory, position = self.params, self.memory(call.branch), call.step.position
        if memory.sorted is None:
            memory.sorted = self._sorted(call)
            if memory.sorted is None:
                return False
        not_static, active = memory.sorted
        if active is None or position - memory.full >= params.static_interval:
            return False
        if position - memory.active < params.active_interval:
            memory.places = None
            return True
        medium = position - memory.medium >= params.medium_interval
        memory.places = not_static if medium else active
        memory.active, memory.medium = position, position if medium else memory.medium
        return memory.places is not None

    def _sorted(self, call: Call) -> tuple[Tensor | None, Tensor | None] | None:
        """What `_sort` says of the denoiser's first branch, or of this one where that has other tokens; None if it is too soon."""
        memory = self.memory(call.branch)
        first = next(branch for branch in call.generation.branches if branch.denoiser is call.denoiser)
        other = self.memory(first)
        if other.sorted is not None and other.tokens == memory.tokens:
            memory.seen = ()
            return other.sorted
        if len(memory.seen) < max(2, self.params.warmup):
            return None
        seen, memory.seen = memory.seen, ()
        return self._sort(call, seen, memory.residual)

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
        memory.full = memory.medium = memory.active = call.step.position

    @property
    def full_budget(self) -> bool:
        return self.params.medium == 0 or self.params.static_interval == 1
