"""Training by the clock: how far a stage has come, its log lines, and its learning rates."""

from __future__ import annotations

import math
import time

import torch


class Clock:
    """Fraction of a stage's seconds that has gone by, and a log line now and then."""

    def __init__(self, stage: str, seconds: float, every: float):
        self.stage, self.seconds, self.every = stage, seconds, every
        self.start = self.last = time.monotonic()
        self.step = self.last_step = 0
        self.sums: dict[str, torch.Tensor] = {}

    @property
    def fraction(self) -> float:
        return (time.monotonic() - self.start) / self.seconds

    def tick(self, **values: torch.Tensor) -> dict[str, float] | None:
        """Count a step. Values stay on the device until a line is due, so that no step waits for the GPU."""
        self.step += 1
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0) + value.detach()
        now = time.monotonic()
        if now - self.last < self.every:
            return None
        means = {name: float(total) / (self.step - self.last_step) for name, total in self.sums.items()}
        rate = (self.step - self.last_step) / (time.monotonic() - self.last)
        line = " ".join(f"{name} {mean:.4f}" for name, mean in means.items())
        print(f"[{self.stage}] {now - self.start:5.0f}s step {self.step} {line} {rate:.1f} steps/s", flush=True)
        if not all(map(math.isfinite, means.values())):
            raise RuntimeError("training diverged")
        self.last, self.last_step, self.sums = time.monotonic(), self.step, {}
        return means


def set_rates(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("peak", group["lr"]) * factor
