"""A profile: what calibration found out about a model, to plan any budget from; a few tables in one small file."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from safetensors.numpy import load_file, save_file

from chitu_hooks import PatchError, Refusal, Sites
from chitu_hooks.errors import nearest

from ..constants import model_of
from .gram import Tables
from .grid import Grid, prediction_of
from .key import Key

FORMAT = 3
"""Of the file, and of what its checks are counted in: 2 counts drift by a rule, 3 by what was measured."""
LEAST = 4
"""Prompts that a profile is made of, at least: fewer say nothing of how much prompts differ."""


@dataclass(frozen=True)
class Check:
    """One budget, tried on prompts whose own tables were left out of the plan."""

    computed: int
    predicted: float
    """Relative error of the latent that the plan foretold."""
    error: float
    """Relative error of the final latent that came out, the root of the mean square over the prompts."""
    psnr: tuple[float, ...]
    """Of each picture to the full run, in dB; empty where the calls returned no pictures."""

    @property
    def numbers(self) -> tuple[float, ...]:
        return self.computed, self.predicted, self.error, *self.psnr


@dataclass(frozen=True)
class Profile:
    """What is known of the guided predictions of one model in one kind of run."""

    model: str
    """As `constants.model_of` names it; weights are not told apart."""
    key: Key
    tables: Tables
    checks: tuple[Check, ...] = ()
    versions: dict[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises:
        ValueError: the parts do not go together, or hold what calibration never writes.
        """
        grid, tables = self.key.grid, self.tables
        if len(grid.sigmas) != tables.steps + 1 or not np.allclose(grid.times, tables.sigmas, rtol=1e-6, atol=1e-9):
            raise ValueError("the sigmas are not those of the tables")
        gram = tables.gram
        if not np.allclose(gram, gram.transpose(0, 2, 1)) or not (np.einsum("pii->pi", gram) > 0).all():
            raise ValueError("the products of the predictions are not those of vectors with a length")
        if not (tables.scale > 0).all():
            raise ValueError("the latents have no length")
        numbers = [*self.key.guidance.values(), *(n for check in self.checks for n in check.numbers)]
        if not all(math.isfinite(number) for number in numbers):
            raise ValueError("a number is not finite")

    # -- the file ---------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the tables as safetensors, with everything else as JSON in the file's head."""
        fields = {field.name: getattr(self.tables, field.name) for field in dataclasses.fields(self.tables)}
        tensors = {name: np.ascontiguousarray(value) for name, value in fields.items() if value is not None}
        head = {
            "format": FORMAT,
            "model": self.model,
            "key": dataclasses.asdict(self.key),
            "checks": [dataclasses.asdict(check) for check in self.checks],
            "versions": self.versions,
        }
        save_file(tensors, Path(path).expanduser(), metadata={"chitu": json.dumps(head)})

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read what `save` wrote.

        Raises:
            PatchError: no such file, a truncated one, or one that is no profile.
        """
        file = Path(path).expanduser()
        if not file.is_file():
            siblings = [p.name for p in file.parent.glob("*.safetensors")] if file.parent.is_dir() else []
            known = nearest(file.name, siblings) or "; chitu calibrate --planned writes one"
            raise PatchError(f"planned: no profile {str(path)!r}{known}")
        try:
            with safetensors.safe_open(file, framework="np") as opened:
                head = json.loads((opened.metadata() or {})["chitu"])
            if head["format"] != FORMAT:
                raise PatchError(f"planned: {str(path)!r} has format {head['format']!r}, not {FORMAT}; calibrate again")
            key = head["key"]
            key["grid"]["sigmas"] = tuple(key["grid"]["sigmas"])
            checks = tuple(Check(**{**check, "psnr": tuple(check["psnr"])}) for check in head["checks"])
            found = Key(Grid(**key["grid"]), tuple(key["size"]), key["branches"], key["guidance"])
            return cls(head["model"], found, Tables(**load_file(file)), checks, head["versions"])
        except (safetensors.SafetensorError, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise PatchError(
                f"planned: {str(path)!r} is truncated or no profile ({type(error).__name__}); chitu calibrate --planned writes one"
            ) from error

    # -- what it fits -----------------------------------------------------------------------------------------------

    def unlike(self, sites: Sites) -> Refusal | None:
        """Why the profile cannot be used on these sites: it was measured on another model, or with another scheduler."""
        own = model_of(sites)
        if own != self.model:
            return Refusal(f"the profile was measured on {self.model}, and this is {own}", "calibrate this model")
        return self.unlike_scheduler(getattr(sites.pipe, "scheduler", None))

    def unlike_scheduler(self, scheduler: Any) -> Refusal | None:
        """The same for another scheduler, which may have been put there after patching."""
        grid = self.key.grid
        own = type(scheduler).__name__, prediction_of(scheduler)
        if own == (grid.scheduler, grid.prediction):
            return None
        return Refusal(
            f"the profile was measured with {grid.scheduler}, which takes {grid.prediction}, and this is {own[0]}, which "
            f"takes {own[1]}",
            "calibrate with this scheduler",
        )

    def without(self, samples: slice) -> Profile:
        """The same but for some samples."""
        tables = self.tables
        final = None if tables.final is None else np.delete(tables.final, samples)
        response = None if tables.response is None else np.delete(tables.response, samples, axis=0)
        if response is not None and not len(response):
            response = None
        gram = np.delete(tables.gram, samples, axis=0)
        rest = dataclasses.replace(tables, gram=gram, final=final, response=response)
        return dataclasses.replace(self, tables=rest)

    def fitted(self, grid: Grid) -> Tables:
        """The tables of a run on `grid`: the end of those measured, or what lies between them by sigma.

        Between two positions the prediction is taken to change linearly over sigma. So the tables of another number of steps
        are combinations of these.
        """
        own = self.key.grid
        if grid.is_tail_of(own):
            return self.tables.after(own.steps - grid.steps)
        mixing, response = between(own, grid), self.tables.response
        if response is not None:
            response = response @ mixing.T
        gram = mixing @ self.tables.gram @ mixing.T
        return Tables(np.asarray(grid.times), gram, self.tables.final, response=response)

    # -- what it foretells ------------------------------------------------------------------------------------------

    @property
    def _known(self) -> list[Check]:
        """Budgets to read off from; a model whose predictions do not change foretells 0, of which there is no logarithm."""
        return [check for check in self.checks if check.predicted > 0]

    def psnr(self, predicted: float) -> float | None:
        """The PSNR to expect, in dB, of a plan with this predicted error; None where no pictures were compared."""
        points = [(check.predicted, float(np.mean(check.psnr))) for check in self._known if check.psnr]
        return _read_off(points, predicted, -20.0) if points else None

    def error(self, predicted: float) -> float:
        """The relative error of the final latent to expect: a plan foretells it for latents that did not drift meanwhile."""
        points = [(check.predicted, math.log10(check.error)) for check in self._known if check.error > 0]
        return float(10 ** _read_off(points, predicted, 1.0)) if points else predicted


def _read_off(points: list[tuple[float, float]], predicted: float, slope: float) -> float:
    """Over the logarithm of `predicted`: between `points` on lines from each to the next, beyond them with `slope` a decade."""
    if predicted <= 0:
        return -slope * math.inf
    x, known = math.log10(predicted), sorted((math.log10(at), value) for at, value in points)
    (first, low), (last, high) = known[0], known[-1]
    if x <= first or x >= last:
        return low + slope * (x - first) if x <= first else high + slope * (x - last)
    return float(np.interp(x, [at for at, _ in known], [value for _, value in known]))


def between(own: Grid, other: Grid) -> np.ndarray:
    """(N', N): what each position of `other` is made of, from the two positions of `own` that its sigma lies between."""
    times = np.asarray(own.times[:-1])
    sign = 1.0 if times[-1] > times[0] else -1.0  # `interp` wants rising points, and sigmas mostly fall
    places = np.interp(sign * np.asarray(other.times[:-1]), sign * times, np.arange(own.steps))
    low = np.minimum(places.astype(int), own.steps - 2)
    mixing = np.zeros((other.steps, own.steps))
    mixing[np.arange(other.steps), low] = low + 1 - places
    mixing[np.arange(other.steps), low + 1] = places - low
    return mixing
