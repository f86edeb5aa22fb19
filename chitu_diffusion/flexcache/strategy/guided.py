"""What strategies share that replace the guided prediction: at a skipped step nothing of the denoiser runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from chitu_hooks import Call, Generation, StepCall
from chitu_hooks.branches import signature

from .. import latent
from ..distance import copied
from .base import Strategy


class GuidedStrategy(Strategy):
    """Each branch returns its last output at a skipped step, and the scheduler gets `prediction` in place of what guidance
    makes of those. So rescaling and intervals of guidance act on computed predictions only.

    Inside a gap the latent is kept in float32.
    """

    skips_trunk = False
    start: ClassVar[dict[str, Any]] = {"signature": None, "output": None}

    # -- what a subclass says ---------------------------------------------------------------------------------------

    def prediction(self, step: StepCall, state: SimpleNamespace) -> torch.Tensor:
        """The guided prediction of a skipped step; `state` is this strategy's memory of the generation."""
        raise NotImplementedError

    def learn_step(self, step: StepCall, state: SimpleNamespace) -> None:
        """After guidance of a computed step, before the scheduler takes it."""

    def skips_next(self, step: StepCall) -> bool:
        """Whether the position after this one is to be skipped."""
        raise NotImplementedError

    # -- each branch ------------------------------------------------------------------------------------------------

    def begin(self, generation: Generation) -> None:
        super().begin(generation)
        vars(generation.memory(self)).update(latent.START, skipped=-1)

    def denoiser_in(self, call: Call) -> Any | None:
        self.see(call)
        return copied(self.memory(call.branch).output) if self._in_gap(call) else None

    def _in_gap(self, call: Call) -> bool:
        if not self.decide(call):
            return False
        call.generation.memory(self).skipped = call.step.index
        return True

    def possible(self, call: Call) -> bool:
        memory = self.memory(call.branch)
        return memory.signature is not None and memory.signature == call.signature

    def learn(self, call: Call) -> None:
        memory = self.memory(call.branch)
        memory.signature, memory.output = call.signature, copied(call.sample)

    def denoiser_out(self, call: Call) -> None:
        if not call.elsewhere:
            return super().denoiser_out(call)
        # The schedule and the shapes say what the rank does that runs this call, so that all ranks have the same gaps.
        call.signature = signature(call)
        if not self._in_gap(call):
            vars(self.memory(call.branch)).update(run=0, signature=call.signature, output=None)
        return None

    # -- the guided prediction --------------------------------------------------------------------------------------

    def step_in(self, step: StepCall) -> None:
        state = step.generation.memory(self)
        gap = state.skipped == step.step.index
        if gap:
            step.model_output = self.prediction(step, state)
        else:
            self.learn_step(step, state)
        latent.enter(step, state, keep=gap or self.skips_next(step))

    def step_out(self, step: StepCall) -> None:
        latent.leave(step, step.generation.memory(self))
