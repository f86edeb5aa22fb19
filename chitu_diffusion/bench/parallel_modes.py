"""The modes of ``chitu bench parallel``, and how each is put on a pipeline: one process, ours on ranks, diffusers' own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from chitu_diffusion import Parallel, patch
from chitu_hooks import Handle, HookMap

OURS, DIFFUSERS = "chitu", "diffusers"


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One way to draw one picture on `ranks` processes."""

    name: str
    maker: str = OURS
    degrees: dict[str, Any] = field(default_factory=dict)
    """Of `Parallel`, or of diffusers' ``ContextParallelConfig``; empty for one process."""
    attention: str | None = None
    threads: int | None = None
    """Of the CPU; None leaves them as they are for ranks."""

    @property
    def single(self) -> bool:
        return not self.degrees

    def content(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "maker": self.maker,
            "degrees": self.degrees,
            "attention": self.attention,
            "threads": self.threads,
        }


def singles(attention: str | None, cores: int | None) -> list[Mode]:
    """One process: the pipeline as it is and ours; on a CPU with every core and with one, since a rank may have one only.

    Args:
        cores: of the CPU that it runs on; None for a GPU.
    """
    kernel = f", attention {attention}" if attention else ""
    rows = [Mode(name="one process, diffusers", maker=DIFFUSERS, threads=cores)]
    if attention:
        rows.append(Mode(name=f"one process, ours{kernel}", attention=attention, threads=cores))
    if cores is not None and cores > 1:
        rows.append(Mode(name="one process, diffusers, one thread", maker=DIFFUSERS, threads=1))
    return rows


def parallel_modes(ranks: int, guided: bool, attention: str | None) -> list[Mode]:
    """Ours: every product of degrees that takes all ranks."""
    rows = []
    for cfg in (1, 2) if guided else (1,):
        if ranks % cfg:
            continue
        for ulysses in divisors(ranks // cfg):
            outer = ranks // cfg // ulysses
            for name in ("ring", "gather") if outer > 1 else ("",):
                found = {"cfg": cfg, "ulysses": ulysses, **({name: outer} if name else {})}
                degrees: dict[str, Any] = {key: degree for key, degree in found.items() if degree > 1}
                rows.append(Mode(name=str(Parallel(**degrees)), degrees=degrees, attention=attention))
    return rows


def peer_modes(ranks: int) -> list[Mode]:
    """diffusers' own: Ulysses, ring, and one inside the other."""
    rows = []
    for ulysses in divisors(ranks):
        ring = ranks // ulysses
        found = {"ulysses_degree": ulysses, "ring_degree": ring}
        degrees = {key: degree for key, degree in found.items() if degree > 1}
        words = " × ".join(f"{key.removesuffix('_degree')} {degree}" for key, degree in degrees.items())
        rows.append(Mode(name=f"diffusers {words}", maker=DIFFUSERS, degrees=degrees))
    return rows


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


@contextlib.contextmanager
def on(mode: Mode, pipe: Any, hook_map: HookMap | None) -> Iterator[Handle]:
    """`pipe` with `mode` on, hooked. diffusers' parallelism cannot be taken off again: load the pipeline anew after it."""
    before = torch.get_num_threads()
    if mode.threads is not None:
        torch.set_num_threads(mode.threads)
    try:
        if mode.maker == DIFFUSERS and mode.degrees:
            enable_diffusers(pipe, hook_map, mode.degrees)
        ours = mode.maker == OURS
        parallel = Parallel(**mode.degrees) if ours and mode.degrees else None
        with patch(pipe, attention=mode.attention if ours else None, parallel=parallel, hook_map=hook_map) as handle:
            yield handle
    finally:
        torch.set_num_threads(before)


def enable_diffusers(pipe: Any, hook_map: HookMap | None, degrees: dict[str, int]) -> None:
    """``enable_parallelism`` on every denoiser that is not parallel yet."""
    import diffusers

    with patch(pipe, hook_map=hook_map) as handle:
        denoisers = [site.inner for site in handle.sites.denoisers]
    # It divides the rank by the number of accelerators, which a CPU has none of.
    count = max(1, torch.accelerator.device_count())
    with mock.patch.object(torch.accelerator, "device_count", lambda: count):
        for denoiser in denoisers:
            if denoiser._parallel_config is None:
                config = diffusers.ContextParallelConfig(**degrees)
                denoiser.enable_parallelism(config=config)
