"""The latent in float32 from the first gap on, where the pipeline rounds it to its own dtype at each step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from chitu_hooks import StepCall

START = {"exact": None, "rounded": None, "version": 0, "dtype": None}
"""What `enter` and `leave` keep in the state that they are given."""


def enter(step: StepCall, state: SimpleNamespace, keep: bool, dtype: torch.dtype) -> None:
    """Before ``scheduler.step``: go on from the exact latent if the pipeline hands back its rounded one untouched.

    Args:
        step: the step.
        state: has the names of `START`, for the generation.
        keep: whether the latent that comes out is to be kept. Then this step of the scheduler is made to compute in float32,
            and so is every later one: a multistep scheduler combines them, and does not mix dtypes.
        dtype: of the prediction. The pipeline gets its latent back in that dtype, or in its own if that is wider.
    """
    if not keep and state.dtype is None:
        return
    if state.dtype is None:
        _widen_kept(step)
    state.dtype = torch.promote_types(step.sample.dtype, dtype)
    if state.exact is not None and step.sample is state.rounded and _version(step.sample) == state.version:
        step.sample = state.exact
    state.exact = state.rounded = None
    step.sample, step.model_output = _wide(step.sample), _wide(step.model_output)


def leave(step: StepCall, state: SimpleNamespace) -> None:
    """After it: the pipeline gets its dtype, and the exact latent is kept."""
    if state.dtype is not None:
        state.exact = step.next_sample
        step.next_sample = state.rounded = step.next_sample.to(state.dtype)
        state.version = _version(state.rounded)


def _version(tensor: torch.Tensor) -> int:
    """How often it was written into: a callback may do that. Where inference mode does not count, it counts as untouched."""
    return 0 if tensor.is_inference() else tensor._version


def _widen_kept(step: StepCall) -> None:
    """In float32 too: the latents and predictions that a multistep scheduler has kept of the steps before."""
    kept, shape = vars(step.generation.scheduler), step.sample.shape
    for name, value in kept.items():
        if isinstance(value, list):
            value[:] = [_wide(item) if _is_latent(item, shape) else item for item in value]
        elif _is_latent(value, shape):
            kept[name] = _wide(value)


def _is_latent(value: Any, shape: torch.Size) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape == shape


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.element_size() < 4 else tensor
