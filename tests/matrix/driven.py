"""A transformer that is driven: built from a small config, and called by the smallest pipeline that really denoises."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import diffusers as D
import torch
from tiny_parts import flow, noise
from torch import nn

from .inputs import Sample, Word

GUIDANCE = 3.0


@dataclass(frozen=True)
class Entry:
    """One transformer class at a tiny size.

    Attributes:
        config: arguments of its constructor.
        inputs: argument name of its forward -> word or value; the first is the sample.
        branches: denoiser calls a step; 1 for models that know no conditioning.
    """

    config: dict[str, Any]
    inputs: dict[str, Any]
    branches: int = 2
    layers: tuple[str, ...] = field(default=("num_layers",))


class Driven(D.DiffusionPipeline):
    """Denoises with one transformer, the branches of guidance one after the other."""

    def __init__(self, transformer: nn.Module, scheduler: Any) -> None:
        super().__init__()
        self.register_modules(transformer=transformer, scheduler=scheduler)
        self.set_progress_bar_config(disable=True)
        self.entry: Entry

    @torch.no_grad()
    def __call__(self, num_inference_steps: int = 4, seed: int = 0) -> tuple[torch.Tensor]:
        name, first = next(iter(self.entry.inputs.items()))
        latents = torch.randn(first.shape, generator=noise(seed))
        rest = {key: value for key, value in self.entry.inputs.items() if key != name}
        self.scheduler.set_timesteps(num_inference_steps)
        start = self.scheduler.timesteps[0]
        conditions = [_values(rest, branch, start) for branch in range(self.entry.branches)]
        for t in self.scheduler.timesteps:
            predictions = []
            for branch, condition in enumerate(conditions):
                clocks = {key: word.make(branch, t) for key, word in rest.items() if _steps(word)}
                given = [latents] if first.listed else latents
                out = self.transformer(**{name: given, **condition, **clocks, "return_dict": False})
                predictions.append(_fit(out, latents))
            guided = predictions[-1] + GUIDANCE * (predictions[0] - predictions[-1])
            latents = self.scheduler.step(guided, t, latents, return_dict=False)[0]
        return (latents,)


def _steps(word: Any) -> bool:
    return isinstance(word, Word) and word.steps


def _values(inputs: dict[str, Any], branch: int, t: torch.Tensor) -> dict[str, Any]:
    return {key: word.make(branch, t) if isinstance(word, Word) else word for key, word in inputs.items()}


def _fit(output: Any, latents: torch.Tensor) -> torch.Tensor:
    """The prediction in the shape of the latents: learned variances are cut off, condition channels stand still."""
    while not isinstance(output, torch.Tensor):
        output = output[0]
    if output.dim() < latents.dim():
        output = output.reshape(latents.shape) if output.numel() == latents.numel() else output[None]
    fitted = torch.zeros_like(latents)
    common = tuple(slice(0, min(a, b)) for a, b in zip(output.shape, latents.shape))
    fitted[common] = output[common].to(latents.dtype)
    return fitted


def build(cls: type, entry: Entry) -> Driven:
    """The driven pipeline of a fresh transformer, always with the same weights."""
    transformer = cls(**entry.config)
    with torch.no_grad():
        for place, (name, parameter) in enumerate(transformer.named_parameters()):
            _fill(name, parameter, noise(place))
    pipe = Driven(transformer.eval(), flow())
    pipe.entry = entry
    return pipe


def _fill(name: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
    """Numbers that keep activations near 1. Constructors leave gates at zero, and some parameters uninitialised."""
    values = torch.randn(parameter.shape, generator=generator)
    if parameter.dim() > 1:
        values *= (parameter.numel() / parameter.shape[0]) ** -0.5
    elif name.endswith("weight"):
        values = 1 + 0.1 * values
    else:
        values *= 0.1
    parameter.copy_(values.to(parameter.dtype))


__all__ = ["Driven", "Entry", "Sample", "build"]
