"""The latent in float32 over several steps, where the pipeline rounds it to its own dtype at each."""

from __future__ import annotations

from types import SimpleNamespace

from chitu_hooks import StepCall

START = {"exact": None, "rounded": None, "dtype": None}
"""What `enter` and `leave` keep in the state that they are given."""


def enter(step: StepCall, state: SimpleNamespace, keep: bool) -> None:
    """Before ``scheduler.step``: go on from the exact latent if the pipeline hands back its rounded one untouched.

    Args:
        step: the step.
        state: has the names of `START`, for the generation.
        keep: whether the latent that comes out is to be kept; then the scheduler is made to compute it in float32.
    """
    state.dtype = (
        step.sample.dtype if keep else None
    )  # the pipeline's own: some keep float32 beside a denoiser in 16 bits
    if state.exact is not None and step.sample is state.rounded:
        step.sample = state.exact
    state.exact = state.rounded = None
    if keep:
        step.model_output = step.model_output.float()


def leave(step: StepCall, state: SimpleNamespace) -> None:
    """After it: the pipeline gets its dtype, and the exact latent is kept."""
    if state.dtype is not None:
        state.exact = step.next_sample
        step.next_sample = state.rounded = step.next_sample.to(state.dtype)
