"""The calls of a calibration, made so that each can be repeated with the same noise, and what came of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from chitu_hooks import Feature, Generation, Order, StepCall
from chitu_hooks.call import map_tensors

CHUNK = 1 << 24
"""Values that are compared at a time."""
LARGE = 1 << 26
"""Values of a clip from which on it is kept in 16 bits, whose rounding is at about 66 dB."""
MOST_PSNR = 100.0
"""Of equal pictures, in dB."""


class Calls:
    """Calls of a pipeline, one a prompt.

    Args:
        prompts: texts, or mappings of arguments.
        arguments: further arguments of every call.
    """

    def __init__(self, prompts: Sequence[str | Mapping[str, Any]], arguments: Mapping[str, Any]) -> None:
        self.calls = [{**({"prompt": p} if isinstance(p, str) else p), **arguments} for p in prompts]
        self._states: dict[int, list[torch.Tensor]] = {}

    def __len__(self) -> int:
        return len(self.calls)

    def run(self, pipe: Any, number: int) -> Any:
        """What the pipeline returns for call `number`; the same every time, also where the call has no generator."""
        call = self.calls[number]
        states = self._states.setdefault(number, [generator.get_state() for generator in generators(call)])
        for generator, state in zip(generators(call), states):
            generator.set_state(state)
        devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
        with torch.random.fork_rng(devices=devices):  # of all, since seeding is of all
            torch.manual_seed(number)
            return pipe(**map_tensors(call, torch.clone))  # pipelines write into what they are handed

    def pictures(self, output: Any, number: int) -> np.ndarray | None:
        """(B, ...) of bytes, or of floats from 0 to 1; None where the call asks for latents."""
        if self.calls[number].get("output_type") == "latent":
            return None
        found = output[0] if isinstance(output, tuple) else next(iter(output.values()))
        if isinstance(found, torch.Tensor):
            found = found.to("cpu", torch.float32).numpy()
        array = found if isinstance(found, np.ndarray) else np.stack([_array(entry) for entry in found])
        if array.dtype == np.uint8:
            return array
        return array.astype(np.float32 if array.size <= LARGE else np.float16)


def _array(entry: Any) -> np.ndarray:
    """A Pillow picture, or a list of them, as an array."""
    return np.stack([np.asarray(frame) for frame in entry]) if isinstance(entry, (list, tuple)) else np.asarray(entry)


def generators(call: Mapping[str, Any]) -> Iterator[torch.Generator]:
    for value in call.values():
        for one in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(one, torch.Generator):
                yield one


def psnr(one: np.ndarray, other: np.ndarray) -> list[float]:
    """Peak signal-to-noise ratio of each of the (B, ...) pictures of `Calls.pictures`, in dB."""
    peak = 255.0 if one.dtype == np.uint8 else 1.0
    ratios = []
    for a, b in zip(one.reshape(len(one), -1), other.reshape(len(other), -1)):
        parts = (slice(start, start + CHUNK) for start in range(0, len(a), CHUNK))
        square = sum(float(np.square(a[part].astype(np.float64) - b[part]).sum()) for part in parts) / len(a)
        ratios.append(MOST_PSNR if square == 0 else min(MOST_PSNR, 10 * math.log10(peak**2 / square)))
    return ratios


class Arrivals(Feature):
    """Keeps the last latent of every generation, on the host."""

    name = "arrivals"
    order = Order.CLOCK

    def __init__(self) -> None:
        self.latents: list[torch.Tensor] = []

    def step_out(self, step: StepCall) -> None:
        step.generation.memory(self).latent = step.next_sample

    def end(self, generation: Generation) -> None:
        latent = getattr(generation.memory(self), "latent", None)
        if latent is not None:
            self.latents.append(latent.float().cpu())
