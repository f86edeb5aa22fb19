"""What a run cost: seconds of each stage, peak memory, FLOPs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from chitu_hooks import Feature, Generation, Order, StepCall
from chitu_hooks.call import Call

STAGES = ("load", "encode", "denoise", "decode")


@dataclass
class Metrics:
    """Sums over every call of one task."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    """Stage -> seconds. *load*: reading the model; *encode*: up to the first denoiser call; *denoise*: to the end of
    the last ``scheduler.step``; *decode*: the rest of the call."""
    peak_memory: int = 0
    """Bytes."""
    peak_memory_of: str = "process"
    """What `peak_memory` is about: a CUDA device since the run began, or the process since it started."""
    steps: int = 0
    """Scheduler steps that were run."""
    flops: dict[str, int | str] = field(default_factory=dict)
    """FLOPs of the denoiser: ``full`` as if nothing was skipped, ``spent`` as run; or ``not counted`` and why."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def synchronizer(device: Any) -> Callable[[], None]:
    """A function that waits for `device`, to be called where a stage ends and never inside one."""
    if getattr(device, "type", str(device)) != "cuda":
        return lambda: None
    import torch

    return lambda: torch.cuda.synchronize(device)


def start_peak_memory(device: Any) -> None:
    """Start counting the peak of a CUDA device anew; a process's own peak cannot be reset."""
    if getattr(device, "type", "") == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: Any) -> tuple[int, str]:
    """Peak in bytes, and what it is the peak of."""
    if getattr(device, "type", "") == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device), str(device)
    try:
        import resource
    except ImportError:  # Windows
        return 0, "not known"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024, "process"


class Stopwatch(Feature):
    """Takes the times of the stages at the clock seam, waiting for the device only where a stage ends."""

    name = "stopwatch"
    exactness = "exact"
    order = Order.CLOCK

    def __init__(self, synchronize: Callable[[], None] = lambda: None) -> None:
        self.synchronize = synchronize
        self.seconds: dict[str, float] = {}
        """Stage -> seconds, of the last generation."""
        self.steps = 0

    def begin(self, generation: Generation) -> None:
        generation.memory(self).begun = self._now()
        generation.memory(self).denoising = generation.memory(self).denoised = None
        self.steps = 0

    def denoiser_in(self, call: Call) -> None:
        memory = call.generation.memory(self)
        if memory.denoising is None:
            memory.denoising = self._now()

    def step_out(self, step: StepCall) -> None:
        self.steps += 1
        if is_last(step):
            step.generation.memory(self).denoised = self._now()

    def end(self, generation: Generation) -> None:
        memory, ended = generation.memory(self), self._now()
        denoising = memory.denoising or ended
        denoised = memory.denoised or ended
        self.seconds = {
            "encode": denoising - memory.begun,
            "denoise": denoised - denoising,
            "decode": ended - denoised,
        }

    def _now(self) -> float:
        self.synchronize()
        return time.perf_counter()


def is_last(step: StepCall) -> bool:
    """Whether this ``scheduler.step`` ends the schedule."""
    timesteps = step.generation.timesteps
    return timesteps is not None and step.step.schedule_index + 1 >= len(timesteps)


class FlopMeter(Feature):
    """Counts the FLOPs of every denoiser call of a generation, once per shape, when it is over."""

    name = "flops"
    exactness = "exact"
    order = Order.CLOCK

    def __init__(self) -> None:
        from chitu_diffusion.flexcache import Ledger

        self.ledger = Ledger()

    def begin(self, generation: Generation) -> None:
        self.ledger.begin()

    def denoiser_in(self, call: Call) -> None:
        self.ledger.see(call)

    def end(self, generation: Generation) -> None:
        self.ledger.close(generation)

    @property
    def flops(self) -> dict[str, Any]:
        """``full``, ``spent`` and ``saved`` FLOPs, or ``not counted`` and why."""
        return self.ledger.flops
