"""What a profile belongs to, besides the model: the kind of run that it was measured on."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

from chitu_hooks import Generation

from .grid import Grid, grid_of


@dataclass(frozen=True)
class Key:
    """One kind of run."""

    grid: Grid
    size: tuple[int, ...]
    """Shape of the latent that the scheduler takes, the batch left out."""
    branches: int
    """Branches of guidance in the first step that are denoiser calls of their own."""
    guidance: dict[str, float]
    """Arguments of the pipeline's call that say how strong guidance is."""

    def unlike(self, other: Key) -> list[str]:
        """In what a run of `other` is none of these, in words. A run may be the end of one of these: image to image."""
        found = []
        if not other.grid.is_tail_of(self.grid):
            found.append(_other_grid(self.grid, other.grid))
        if other.size != self.size:
            found.append(f"the profile is of latents {_shape(self.size)} and the run's are {_shape(other.size)}")
        if (other.guidance, other.branches) != (self.guidance, self.branches):
            found.append(f"the profile is of {_guidance(self)} and the run has {_guidance(other)}")
        return found


def _other_grid(own: Grid, other: Grid) -> str:
    if other.steps > own.steps:
        return f"the profile is of {own.steps} steps and the run has {other.steps}"
    end = "" if other.steps == own.steps else f"the last {other.steps} of "
    return f"the run's {other.steps} steps have other sigmas than {end}the profile's {own.steps}"


def _shape(size: Sequence[int]) -> str:
    return "×".join(str(side) for side in size)


def _guidance(key: Key) -> str:
    scales = " and ".join(f"{name} {value:g}" for name, value in key.guidance.items())
    return f"{scales or 'no guidance'}, {key.branches} calls a step" if key.branches != 1 else scales or "no guidance"


def key_of(generation: Generation, size: tuple[int, ...], branches: int) -> Key | None:
    """Of the run that is underway; None while it is not known where in the schedule it begins."""
    grid = grid_of(generation)
    return None if grid is None else Key(grid, size, branches, guidance_of(generation))


def guidance_of(generation: Generation) -> dict[str, float]:
    """The numbers among the arguments of the pipeline's call that are about guidance, defaults included."""
    signature = inspect.signature(type(generation.pipe).__call__)
    call = signature.bind_partial(generation.pipe, *generation.args, **generation.kwargs)
    call.apply_defaults()
    return {
        name: float(value)
        for name, value in call.arguments.items()
        if ("guidance" in name or "cfg" in name) and isinstance(value, (int, float)) and not isinstance(value, bool)
    }
