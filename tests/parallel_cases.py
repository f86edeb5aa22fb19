"""What the ranks of the parallel tests do: run a tiny pipeline alone and in parallel, and tell how far apart the results are."""

from __future__ import annotations

import traceback
from typing import Any, NamedTuple

import torch
import variants
from probes import difference
from tiny import build, run

from chitu_diffusion import Parallel, patch
from chitu_diffusion.parallel.context import ContextParallel
from chitu_hooks import ChituError

ODD: dict[str, dict[str, int]] = {
    "flux": {"height": 14, "width": 10},
    "flux2": {"height": 14, "width": 10},
    "flux2_klein": {"height": 14, "width": 10},
    "qwen": {"height": 24, "width": 40},
    "sd3": {"height": 15, "width": 15},
    "pixart": {},
    "wan": {"num_frames": 5},
    "lumina2": {},
    "zimage": {},
}
"""Sizes with an odd number of image tokens. Z-Image and PixArt have none; the packed sequence of Lumina is odd anyway."""


class Case(NamedTuple):
    """One pipeline, one mode, one call."""

    name: str
    parallel: tuple[tuple[str, Any], ...]
    call: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        mode = "-".join(f"{key}{value}" for key, value in self.parallel)
        return f"{self.name}-{mode}" + "".join(f"-{key}{value}" for key, value in self.call)


def case(name: str, call: dict[str, Any] | None = None, **parallel: Any) -> Case:
    return Case(name, tuple(parallel.items()), tuple((call or {}).items()))


class Outcome(NamedTuple):
    """What came of a case on one rank."""

    difference: float
    """From one process, relative to its largest value."""
    features: dict[str, dict[str, Any]]
    """What the features report, by name."""
    notes: list[str]


def outcomes(rank: int, cases: list[Case], steps: int = 3) -> dict[str, Outcome | str]:
    """Case -> outcome, or the message of the refusal, or a traceback."""
    found: dict[str, Outcome | str] = {}
    pipes: dict[str, Any] = {}
    alone: dict[Any, torch.Tensor] = {}
    for one in cases:
        if one.name not in pipes:
            pipes[one.name] = build(one.name)
        pipe, call = pipes[one.name], dict(one.call)
        key = (one.name, one.call)
        if key not in alone:
            alone[key] = run(one.name, pipe, steps, **call)
        found[str(one)] = attempt(pipe, dict(one.parallel), lambda: run(one.name, pipe, steps, **call), alone[key])  # noqa: B023
    return found


def attempt(pipe: Any, parallel: dict[str, Any], call: Any, expected: torch.Tensor) -> Outcome | str:
    try:
        with patch(pipe, parallel=Parallel(**parallel)) as handle:
            got = call()
            report = handle.report()
    except ChituError as error:
        return str(error)
    except Exception:
        return traceback.format_exc()
    return Outcome(difference(got, expected), {f["name"]: f for f in report.features}, report.notes)


class Deaf(ContextParallel):
    """Tokens are spread, and attention does not exchange: what the tests of exactness have to notice."""

    def attention(self, *_: Any) -> None:
        return None


def controls(rank: int, names: list[str], ranks: int) -> dict[str, float]:
    """Family -> how far off the result is without any exchange."""
    from chitu_diffusion.adapters import registry
    from chitu_diffusion.parallel.mesh import make_mesh
    from chitu_hooks import patch as hook

    found = {}
    parallel = Parallel(ulysses=ranks)
    for name in names:
        pipe = build(name)
        expected = run(name, pipe, 3)
        with hook(pipe, [Deaf(parallel, make_mesh(parallel))], registry=registry()):
            found[name] = difference(run(name, pipe, 3), expected)
    return found


VARIANTS = {
    "flux_controlnet": variants.flux_controlnet,
    "sd3_controlnet": variants.sd3_controlnet,
    "skip_first": lambda: variants.skip_layers(0),
    "skip_last": lambda: variants.skip_layers(3),
    "flux_ip_adapter": variants.flux_ip_adapter,
}


def variant_outcomes(rank: int, parallels: list[dict[str, Any]]) -> dict[str, Outcome | str]:
    """Variant and mode -> outcome: ControlNets, skipped layers, image prompts."""
    found = {}
    for name, make in VARIANTS.items():
        variant = make()
        expected = variant.call()
        for parallel in parallels:
            mode = "-".join(f"{key}{value}" for key, value in parallel.items())
            found[f"{name}-{mode}"] = attempt(variant.pipe, parallel, variant.call, expected)
    return found
