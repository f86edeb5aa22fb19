"""What every strategy shares: the limits, the decision, the skip, the forecast, and the books."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from chitu_hooks import Branch, Call, ChituWarning, Feature, Generation, HookMap, Order, Refusal, Sites
from chitu_hooks.branches import signature

from ..flops import Ledger
from ..forecast import Tree, extrapolate, updated
from ..limits import Params
from .checks import cache_of_diffusers, few_steps, stochastic_call, too_few_blocks


class Strategy(Feature):
    """Skips the trunk where `wants` says so, the shared limits allow it and a residual is there.

    A subclass writes `wants`, and if it needs them `look` and `learn`. What belongs to one branch lives in
    ``self.memory(branch)`` and is gone when the generation ends.

    Attributes:
        decides: where: before the denoiser (`denoiser_in`), or in a method of the strategy's own, further in.
        adaptive: decisions depend on the data of the batch: the report then declares ``batch_coupled``.
        cuts_tokens: the trunk runs on fewer tokens in some calls, which no feature that spreads them over ranks expects.
        start: names and first values of what the strategy keeps for each branch.
        order_of_forecast: highest difference by which the residual is extrapolated; 0 holds it.
        damping: part of the way that the extrapolation goes; 1 is Taylor's.
        reduce: applied to a tensor of sums of absolute values, (2, B), before a decision reads it. Where tokens are spread
            over ranks an all-reduce (sum) stands here, and where the batch is, a gather of the samples of all ranks, so that
            every rank divides the same sums and decides alike.
    """

    exactness = "lossy"
    order = Order.CACHE
    skips_trunk = True
    decides: ClassVar[str] = "denoiser_in"
    adaptive: ClassVar[bool] = False
    cuts_tokens: ClassVar[bool] = False
    start: ClassVar[dict[str, Any]] = {}
    order_of_forecast: int = 0
    damping: float = 1.0

    def __init__(self, params: Params) -> None:
        self.params = params
        self.name = params.strategy
        self.ledger = Ledger()
        self.inferred = False
        self.reduce: Callable[[torch.Tensor], torch.Tensor] = lambda sums: sums

    # -- what a strategy says ---------------------------------------------------------------------------------------

    def wants(self, call: Call) -> bool:
        """Whether the policy would skip this call. Every rank has to come to the same answer.

        Asked once a position, where `warmup`, `cooldown` and `max_consecutive` allow a skip.
        """
        raise NotImplementedError

    def look(self, call: Call) -> None:
        """Before every decision, also where the limits forbid a skip."""

    def learn(self, call: Call) -> None:
        """After every computed call."""

    @property
    def full_budget(self) -> bool:
        """Whether these parameters never skip, so that a generation without a hit is what was asked for."""
        return False

    # -- the feature ------------------------------------------------------------------------------------------------

    def bind(self, sites: Sites, hook_map: HookMap) -> Refusal | None:
        """Refuse where diffusers' own cache is on, or where the front and back blocks are all there are."""
        self.inferred = hook_map.learns
        return cache_of_diffusers(sites) or too_few_blocks(sites, self.front, self.back)

    def begin(self, generation: Generation) -> None:
        self.ledger.begin()

    def see(self, call: Call) -> None:
        """What comes first in every call: the books, and the call's signature, before features further in cut its arguments."""
        self.ledger.see(call)
        if call.signature is None:
            call.signature = signature(call)

    def denoiser_in(self, call: Call) -> Any | None:
        self.see(call)
        self.look(call)
        if self.decides == "denoiser_in" and self.decide(call):
            call.skip_trunk(self.forecast(call))
        return None

    def denoiser_out(self, call: Call) -> None:
        memory = self.memory(call.branch)
        if call.skipping or call.replaced or memory.reusing:
            return
        memory.run = 0
        if self.order_of_forecast and call.branch.skippable:
            self._remember(memory, call)
        self.learn(call)
        call.generation.measure_held()

    def end(self, generation: Generation) -> None:
        self.ledger.close(generation)
        idle = self.ledger.asked and not self.ledger.skipped and not self.full_budget
        if generation.steps_done and idle:
            warnings.warn(f"{self.name}: {self._idle}", ChituWarning, stacklevel=2)
        elif not generation.steps_done and any(calls["computed"] > 1 for calls in generation.tally.values()):
            warnings.warn(
                f"{self.name}: the pipeline took no step of its scheduler, so every call counted as position 0 and was "
                "computed",
                ChituWarning,
                stacklevel=2,
            )

    def report(self) -> dict[str, Any]:
        return {"params": _plain(self.params), "batch_coupled": self.adaptive, **self.ledger.report()}

    # -- the decision -----------------------------------------------------------------------------------------------

    def memory(self, branch: Branch) -> SimpleNamespace:
        """What this strategy keeps for `branch`: `start`, and what the base class needs."""
        memory = branch.memory(self)
        if not vars(memory):
            vars(memory).update(position=-1, due=False, reusing=False, run=0, differences=[], index=-1, **self.start)
        return memory

    def learning(self, call: Call) -> bool:
        """Whether `call` may be the one in which an inferred map learns the streams, and `trunk_in` and `trunk_out` are not
        called: the first of a branch. No generation uses it then, so that the first generation is like all others."""
        return self.inferred and not call.branch.computed

    def possible(self, call: Call) -> bool:
        """Whether there is something to reuse in this call."""
        return call.can_skip

    def decide(self, call: Call) -> bool:
        """Whether to skip, once a position: both stages of an order-2 step, and a step that is taken twice, agree."""
        memory, position = self.memory(call.branch), call.step.position
        new = memory.position != position
        memory.reusing = False
        if new:
            memory.position = position
            memory.due = self._allowed(call, memory) and self.wants(call)
        if not memory.due:
            return False
        self.ledger.wanted += not call.elsewhere
        if not self.possible(call):
            self._tell_impossible(call)
            return False
        if new:
            memory.run += 1
        memory.reusing = True
        self._warn_unsuited(call.generation)
        return True

    def ratios(self, call: Call, sums: torch.Tensor) -> list[float]:
        """Relative distances, one a sample: ``sums[0] / sums[1]`` of the reduced `sums`, shaped (2, B).

        They are of the whole batch, also where this rank has a part of it.

        The one place where a decision waits for the device. A distance that is no number, or zero throughout, is
        infinite, so that the call is computed, and the report says so.
        """
        above, below = self.reduce(sums).tolist()
        found = [a / b if b else math.nan for a, b in zip(above, below)]
        if all(math.isfinite(value) for value in found) and any(found):
            return found
        what = "zero" if not any(found) else "not finite"
        call.generation.note(f"{self.name}: {call.branch.name} was computed where its distance was {what}")
        return [math.inf] * len(found)

    def _allowed(self, call: Call, memory: SimpleNamespace) -> bool:
        params, position, steps = self.params, call.step.position, call.generation.num_steps
        if position < params.warmup or (params.cooldown and (steps is None or position >= steps - params.cooldown)):
            return False
        return params.max_consecutive is None or memory.run < params.max_consecutive

    def _tell_impossible(self, call: Call) -> None:
        if not call.branch.computed:
            return
        why = (
            "the shapes or the presence of the denoiser's arguments changed since the last computed step"
            if call.branch.skippable or not self.skips_trunk
            else "the last computed step left no residual for some stack"
        )
        call.generation.note(
            f"{self.name}: {call.branch.name} computed position {call.step.position} although a skip was due: {why}"
        )

    @property
    def _idle(self) -> str:
        if self.ledger.wanted:
            return f"{self.ledger.wanted} skips were due and none happened"
        return f"nothing was skipped in {self.ledger.computed} calls with {self.params}"

    def _warn_unsuited(self, generation: Generation) -> None:
        """Once a generation, at its first skip."""
        memory = generation.memory(self)
        if hasattr(memory, "warned"):
            return
        memory.warned = True
        for text in (few_steps(generation), stochastic_call(generation)):
            if text:
                warnings.warn(f"{self.name}: {text}", ChituWarning, stacklevel=2)

    # -- the forecast -----------------------------------------------------------------------------------------------

    def forecast(self, call: Call) -> Tree | None:
        """The residuals to add in this call, or None to hold those of the last computed one."""
        memory = self.memory(call.branch)
        if len(memory.differences) < 2:
            return None
        return extrapolate(memory.differences, call.step.index - memory.index, self.damping)

    def _remember(self, memory: SimpleNamespace, call: Call) -> None:
        residuals, index = dict(call.branch.residuals), call.step.index
        memory.differences = updated(memory.differences, residuals, index - memory.index, self.order_of_forecast)
        memory.index = index


def _plain(params: Params) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(params).items()}
