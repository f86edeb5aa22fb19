"""`easycache`: the output changes about as much as the input does, times what that was last time."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from chitu_hooks import Call, RefusedError

from ..distance import alike, copied, distance_l1, norm_l1
from ..params import EasyCache
from .base import Strategy


class EasyCacheStrategy(Strategy):
    """Replaces the denoiser's output: nothing of it runs at a skipped step."""

    params: EasyCache
    adaptive = True
    skips_trunk = False
    start: ClassVar[dict[str, Any]] = {
        "input": None,
        "before": None,
        "at": None,
        "output": None,
        "rate": None,
        "sum": None,
        "signature": None,
    }

    def denoiser_in(self, call: Call) -> Any | None:
        self.see(call)
        memory = self.memory(call.branch)
        if memory.input is None:
            _check_sample(call)
        memory.before, memory.input = memory.input, copied(call.input)
        return shifted(memory.input, memory.at, memory.output) if self.decide(call) else None

    def possible(self, call: Call) -> bool:
        memory = self.memory(call.branch)
        return memory.output is not None and memory.signature == call.signature

    def wants(self, call: Call) -> bool:
        """Accumulates rate * |change of the input| / |output|, per sample; the worst sample decides."""
        memory = self.memory(call.branch)
        if memory.rate is None or not self.params.threshold or not self.possible(call):
            return False
        if not alike(memory.input, memory.before):
            return False
        changes = torch.stack([memory.rate[0] * distance_l1(memory.input, memory.before), memory.rate[1]])
        found = self.ratios(call, changes)
        memory.sum = [a + b for a, b in zip(memory.sum or [0.0] * len(found), found)]
        return max(memory.sum) < self.params.threshold

    def learn(self, call: Call) -> None:
        memory = self.memory(call.branch)
        if alike(memory.at, memory.input) and alike(memory.output, call.sample):
            output = distance_l1(call.sample, memory.output)
            # |change of output| / |change of input|, to be multiplied by a further change of the input.
            rate = output / distance_l1(memory.input, memory.at)
            memory.rate, memory.sum = (rate, norm_l1(call.sample)), None
        memory.at, memory.output, memory.signature = memory.input, copied(call.sample), call.signature

    @property
    def full_budget(self) -> bool:
        return self.params.threshold == 0


def _check_sample(call: Call) -> None:
    """Refuse a model that takes something else before its sample.

    Raises:
        RefusedError: the first argument is not made of floating-point numbers.
    """
    given = call.input if isinstance(call.input, torch.Tensor) else next(iter(call.input or ()), None)
    if not isinstance(given, torch.Tensor) or not given.is_floating_point():
        first = next(iter(call.denoiser.arguments))
        raise RefusedError(
            f"easycache: {call.denoiser.name} ({type(call.denoiser.inner).__name__}) takes {first!r} first, which is no noisy "
            "sample, so how far that has moved cannot be seen; use static, fbcache or taylorseer"
        )


def shifted(input_now: Any, input_then: Any, output_then: Any) -> Any:
    """The output moved along with the input, where they have the same shape.

    Further input channels (a mask, an image) come after the sample's and stay out; further output channels (a learned
    variance) are held.
    """
    if not isinstance(output_then, torch.Tensor):
        return [shifted(*parts) for parts in zip(input_now, input_then, output_then, strict=True)]
    output, unlike = output_then.clone(), [a != b for a, b in zip(input_now.shape, output_then.shape)]
    if input_now.dim() != output.dim() or sum(unlike) > 1:
        return output  # not a prediction of the same grid: held
    common = tuple(slice(min(a, b)) for a, b in zip(input_now.shape, output.shape))
    output[common] += (input_now[common] - input_then[common]).to(output.dtype)
    return output
