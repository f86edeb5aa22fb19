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

    From the first gap on the latent is kept in float32.
    """

    skips_trunk = False
    start: ClassVar[dict[str, Any]] = {"signature": None, "output": None}

    # -- what a subclass says ---------------------------------------------------------------------------------------

    def prediction(self, step: StepCall, state: SimpleNamespace) -> torch.Tensor:
        """The guided prediction of a skipped step; `state` is this strategy's memory of the generation."""
        raise NotImplementedError

    def learn_step(self, step: StepCall, state: SimpleNamespace) -> None:
        """After guidance of a computed step, before the scheduler takes it; may replace ``step.model_output``."""

    def skips_next(self, step: StepCall) -> bool:
        """Whether the position after this one is to be skipped."""
        raise NotImplementedError

    # -- each branch ------------------------------------------------------------------------------------------------

    def begin(self, generation: Generation) -> None:
        super().begin(generation)
        vars(generation.memory(self)).update(latent.START, skipped=-1, denoisers=set(), outputs={})

    def denoiser_in(self, call: Call) -> Any | None:
        self.see(call)
        return copied(self.memory(call.branch).output) if self._in_gap(call) else None

    def _in_gap(self, call: Call) -> bool:
        if not self.decide(call):
            return False
        call.generation.memory(self).skipped = call.step.index
        return True

    def possible(self, call: Call) -> bool:
        memory, state = self.memory(call.branch), call.generation.memory(self)
        if memory.signature is None and call.denoiser.name not in state.denoisers and call.signature in state.outputs:
            # A second expert takes over; what guidance makes of its branches is forecast from the first one's all the same.
            memory.signature, memory.output = call.signature, state.outputs[call.signature]
        return memory.signature is not None and memory.signature == call.signature

    def learn(self, call: Call) -> None:
        self._keep(call, copied(call.sample))

    def _keep(self, call: Call, output: Any) -> None:
        memory, state = self.memory(call.branch), call.generation.memory(self)
        memory.signature, memory.output = call.signature, output
        state.denoisers.add(call.denoiser.name)
        state.outputs[call.signature] = output

    def denoiser_out(self, call: Call) -> None:
        if not call.elsewhere:
            return super().denoiser_out(call)
        # The schedule and the shapes say what the rank does that runs this call, so that all ranks have the same gaps.
        call.signature = signature(call)
        if not self._in_gap(call):
            self.memory(call.branch).run = 0
            self._keep(call, call.sample)
        return None

    # -- the guided prediction --------------------------------------------------------------------------------------

    def step_in(self, step: StepCall) -> None:
        state, computed = step.generation.memory(self), step.model_output
        if state.skipped == step.step.index:
            step.model_output = self.prediction(step, state)
        else:
            self.learn_step(step, state)
        keep = step.model_output is not computed or self.skips_next(step)
        latent.enter(step, state, keep, computed.dtype)

    def step_out(self, step: StepCall) -> None:
        latent.leave(step, step.generation.memory(self))
