"""Making a profile: whole runs, how far velocities move when latents do, and then budgets tried on prompts that their plans have
not seen.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from chitu_hooks import ChituWarning, Feature, Handle, PatchError

from ..constants import model_of
from .course import Course
from .drift import Drift, Sample, WholeRuns, responses
from .gram import Tables
from .params import Planned
from .profile import LEAST, Check, Profile
from .record import Run, Velocities
from .rehearse import Arrivals, Calls, psnr

TRIED = (1 / 2, 1 / 3, 1 / 5)
"""Parts of the steps that are tried."""
MOST_TRIED = 4
"""Calls on which they are."""
FOLLOWED = (1 / 3, 1 / 5)
"""Parts of the steps in the runs that responses are measured in: where gaps are long enough for them to matter."""


def profile_of(handle: Handle, runs: list[Run], latents: list[torch.Tensor]) -> Profile:
    """What `runs` and the latents that they ended with say of the model of `handle`.

    Raises:
        PatchError: there are none, they are not all of one kind, or a prediction is not finite.
    """
    if not latents:
        raise PatchError("planned: the pipeline took no step of its scheduler, so there is nothing to plan")
    if len(runs) != len(latents):
        raise PatchError(
            f"planned: {len(latents) - len(runs)} of {len(latents)} calls ended before the last of their steps; calibrate with "
            "calls that are not interrupted"
        )
    key = runs[0].key
    if key.grid.steps < 2:
        raise PatchError("planned: runs of 1 step leave nothing to plan; calibrate with 2 steps or more")
    for run in runs[1:]:
        others = [*key.unlike(run.key), *run.key.unlike(key)]
        if others:
            raise PatchError(f"planned: the calls of a calibration are to be alike, and {others[0]}")
    gram = np.concatenate([run.gram for run in runs])
    lengths = np.einsum("pii->pi", gram)
    if not np.isfinite(gram).all() or not (lengths > 0).all():
        what = "zero throughout" if np.isfinite(gram).all() else "not finite"
        raise PatchError(f"planned: some prediction is {what}, so nothing can be planned")
    versions = {name: importlib.metadata.version(name) for name in ("torch", "diffusers")}
    final = torch.cat([latent.double().square().flatten(1).mean(1) for latent in latents])
    tables = Tables(np.asarray(key.grid.times), gram, final.numpy())
    return Profile(model_of(handle.sites), key, tables, versions=versions)


class Recording:
    """What is kept of the calls of a calibration while they run: `see` each of them, with `features` on.

    Raises:
        PatchError: the calls are too few.
    """

    def __init__(self, calls: Calls) -> None:
        if len(calls) < LEAST:
            raise PatchError(
                f"planned: {len(calls)} prompts are too few to tell how much prompts differ; give at least {LEAST}, or "
                "better 8 to 16"
            )
        self.calls = calls
        self._velocities, self._arrivals, self._whole = Velocities(), Arrivals(), WholeRuns(MOST_TRIED)
        self._pictures: dict[int, np.ndarray | None] = {}

    @property
    def features(self) -> tuple[Feature, ...]:
        return self._velocities, self._arrivals, self._whole

    def see(self, number: int, output: Any) -> None:
        """Call `number` returned `output`."""
        if number < MOST_TRIED:
            self._pictures[number] = self.calls.pictures(output, number)

    def profile(self, handle: Handle) -> Profile:
        """What the calls say, with budgets tried on the first of them.

        Raises:
            PatchError: see `profile_of`.
        """
        profile = self._followed(handle, profile_of(handle, self._velocities.runs, self._arrivals.latents))
        counts = counts_of(TRIED, profile)
        return dataclasses.replace(profile, checks=tuple(self._tried(handle, profile, count) for count in counts))

    def _followed(self, handle: Handle, profile: Profile) -> Profile:
        """With the responses of velocities, where plans count them; the whole runs are not needed any more."""
        runs, self._whole.runs = self._whole.runs, []
        if not profile.key.grid.adds_velocities:
            return profile
        found: list[list[Sample]] = []
        for number, whole in enumerate(runs):
            found.append([])
            for count in counts_of(FOLLOWED, profile):
                drift = Drift(whole)
                course, _ = self._rehearsed(handle, profile, number, count, drift)
                found[-1] += drift.at(course.computed if course is not None else (0,))
        tables = dataclasses.replace(profile.tables, response=responses(profile.tables, found))
        return dataclasses.replace(profile, tables=tables)

    def _tried(self, handle: Handle, profile: Profile, count: int) -> Check:
        """Plans of `count` steps on calls that they are not made from."""
        errors: list[float] = []
        ratios: list[float] = []
        predicted: list[float] = []
        for number, full in self._pictures.items():
            arrival = Arrivals()
            course, output = self._rehearsed(handle, profile, number, count, arrival)
            if course is not None:
                predicted.append(course.plan.predicted)
            errors += relative(arrival.latents[0], self._arrivals.latents[number])
            pictures = self.calls.pictures(output, number)
            if full is not None and pictures is not None:
                ratios += psnr(pictures, full)
        rounded = tuple(round(ratio, 2) for ratio in ratios)
        return Check(count, root_mean_square(predicted), root_mean_square(errors), rounded)

    def _rehearsed(
        self, handle: Handle, profile: Profile, number: int, count: int, watch: Feature
    ) -> tuple[Course | None, Any]:
        """Call `number` with `count` steps computed, by a plan that it had no part in, under the eyes of `watch`."""
        from ..strategy.planned import PlannedStrategy

        params = Planned(budget=count / profile.key.grid.steps)
        strategy = PlannedStrategy(params, profile.without(samples_of(number, self._arrivals.latents)))
        with handle.also(strategy, watch), warnings.catch_warnings():
            warnings.simplefilter("ignore", ChituWarning)  # what a user should know, `patch` says when they use it
            output = self.calls.run(handle.pipe, number)
        return strategy.course, output


def counts_of(parts: Sequence[float], profile: Profile) -> list[int]:
    """So many steps are these parts of the profile's; the most first, and none twice."""
    steps = profile.key.grid.steps
    return sorted({max(1, round(part * steps)) for part in parts} - {steps}, reverse=True)


def samples_of(number: int, arrivals: list[torch.Tensor]) -> slice:
    """Which samples of the tables are those of call `number`."""
    start = sum(len(latent) for latent in arrivals[:number])
    return slice(start, start + len(arrivals[number]))


def relative(one: torch.Tensor, other: torch.Tensor) -> list[float]:
    """Length of the difference of each sample over that of `other`."""
    missed, length = ((tensor.double().flatten(1)).norm(dim=1) for tensor in (one - other, other))
    return (missed / length).tolist()


def root_mean_square(values: list[float]) -> float:
    return float(np.sqrt(np.mean(np.square(values))))
