"""One call of a pipeline whose ranks draw one picture together: what is watched, and what is known of it before."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from chitu_diffusion.parallel.choose import guides
from chitu_diffusion.runtime import DiffusionTask
from chitu_diffusion.runtime.metrics import is_last
from chitu_hooks import Call, Feature, Generation, Order, StepCall

from .lab import Lab
from .parallel_modes import Mode, on
from .timing import Stopwatch


class Watch(Feature):
    """Marks the end of every step, and keeps the last latents."""

    name = "watch"
    exactness = "exact"
    order = Order.CLOCK

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks = Stopwatch(device)
        self.latents: torch.Tensor | None = None

    def begin(self, generation: Generation) -> None:
        self.marks, self.latents = Stopwatch(self.device), None

    def denoiser_in(self, call: Call) -> None:
        if not self.marks.marks:
            self.marks.mark()

    def step_out(self, step: StepCall) -> None:
        self.marks.mark()
        if is_last(step):
            self.latents = step.next_sample


def default_steps(pipe: Any) -> int:
    """Scheduler steps of a call that names no number."""
    return int(inspect.signature(type(pipe).__call__).parameters["num_inference_steps"].default)


def guided(lab: Lab, task: DiffusionTask) -> bool:
    """Whether a step of the call has more than one branch of guidance."""
    with on(Mode(name=""), lab.pipe, lab.hook_map) as handle:
        hook_map = handle.hook_map
    if task.guidance is None:
        return guides(lab.pipe, hook_map)
    return task.guidance > 1 and hook_map.guidance != "embedded"
