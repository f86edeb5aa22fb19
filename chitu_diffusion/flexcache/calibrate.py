"""Measuring the constants that strategies need, on the model itself: an explicit run that computes every step."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import yaml

from chitu_hooks import Call, Feature, Generation, Handle, Order, PatchError, Streams

from .constants import model_of
from .distance import copied, main_stream, relative_l1
from .planning.measure import Recording
from .planning.rehearse import Calls
from .planning.tell import told


class Magnitudes(Feature):
    """Ratios of the magnitude of what the trunk adds to that at the step before, for each branch of guidance.

    As MagCache defines them (https://arxiv.org/abs/2506.09045): the norm over the channels of each image token, the ratio to
    that of the step before, and the mean over the tokens.
    """

    name = "calibrate"
    order = Order.CLOCK
    skips_trunk = True  # it never skips; the engine keeps residuals for features that say so

    def __init__(self) -> None:
        self.runs: list[dict[int, list[float]]] = []
        """Per generation: branch -> ratio by position, from 1."""

    def denoiser_out(self, call: Call) -> None:
        if call.step.stage or call.replaced:
            return
        memory = call.branch.memory(self)
        norms = torch.linalg.vector_norm(trunk_residual(call), dim=-1, dtype=torch.float32)
        before, memory.norms = getattr(memory, "norms", None), norms
        if before is not None:
            ratios = vars(call.generation.memory(self)).setdefault("ratios", {})
            ratios[call.branch.ordinal, call.step.position] = (norms / before).mean()

    def end(self, generation: Generation) -> None:
        found = vars(generation.memory(self)).get("ratios", {})
        lists: dict[int, list[float]] = {}
        for branch, _ in found:
            # A second expert's first call has no step before it: 1, which nothing reads, since it is computed anyway.
            values = (found.get((branch, position)) for position in range(1, generation.positions))
            lists[branch] = [1.0 if value is None else round(float(value), 5) for value in values]
        self.runs.append(lists)


class Changes(Feature):
    """Relative L1 changes, from step to step, of what enters the trunk and of what leaves it, for each branch.

    TeaCache (https://arxiv.org/abs/2411.19108) predicts the one from the other.
    """

    name = "changes"
    order = Order.CLOCK

    def __init__(self) -> None:
        self.points: list[tuple[float, float]] = []
        """Change of the input, change of the output."""

    def trunk_in(self, call: Call, streams: Streams) -> None:
        self._see(call, "entered", streams)

    def trunk_out(self, call: Call, streams: Streams) -> None:
        self._see(call, "left", streams)

    def _see(self, call: Call, what: str, streams: Streams) -> None:
        memory, stream = vars(call.branch.memory(self)), copied(main_stream(streams))
        before, memory[what] = memory.get(what), stream
        if before is not None:
            sums = (
                vars(call.generation.memory(self)).setdefault("sums", {}).setdefault((call.branch, call.step.index), {})
            )
            sums[what] = relative_l1(stream, before).sum(1)

    def end(self, generation: Generation) -> None:
        for sums in vars(generation.memory(self)).get("sums", {}).values():
            if len(sums) == 2:
                (a, b), (c, d) = sums["entered"].tolist(), sums["left"].tolist()
                self.points.append((a / b, c / d))


def fitted(points: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """The polynomial of the output's change, of degree 4 as TeaCache's, or lower where points are few; and where it holds."""
    x, y = zip(*points)
    degree = max(1, min(4, len(points) // 4))
    return {
        "coefficients": [float(c) for c in np.polyfit(x, y, degree)] if len(points) > 1 else [0.0, y[0]],
        "domain": [min(x), max(x)],
    }


def trunk_residual(call: Call) -> torch.Tensor:
    """What the trunk adds to the image tokens: the sum over the stacks where they are a stream of their own.

    A stack of joint tokens after such stacks has another length; then the last stack stands for the trunk.
    """
    stacks = call.denoiser.stacks
    parts = [main_stream(added) for number, added in call.branch.residuals.items() if not stacks[number].refiner]
    alike = [part for part in parts if part.shape == parts[-1].shape]
    return torch.stack(alike).sum(0) if len(alike) == len(parts) else parts[-1]


def calibrate(
    handle: Handle,
    prompts: Sequence[str | Mapping[str, Any]],
    path: str | Path | None = None,
    planned: str | Path | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    """Run the pipeline of `handle` once for each prompt, computing every step, and measure.

    Args:
        handle: of a patch without a cache.
        prompts: texts, or mappings of arguments of the pipeline's call.
        path: YAML file of constants to write; None writes none.
        planned: safetensors file to write, the profile of the planned cache; without it there is none. With it and no `path`
            no constants are measured, and some budgets are tried afterwards, on at most four of the prompts.
        arguments: further arguments of every call, such as ``num_inference_steps``.

    Returns:
        What the file holds: the model, how it was measured, and the constants by strategy. Under `planned` the profile in
        numbers.

    Raises:
        PatchError: no prompts, or too few for a profile, or the handle has a cache on, or a file cannot be written.
    """
    skipping = [feature.name for feature in handle.features if feature.skips_trunk or feature.order == Order.CACHE]
    if skipping:
        raise PatchError(f"calibrate computes every step, and {skipping[0]} is on; patch without a cache for it")
    if isinstance(prompts, str) or not prompts:
        raise PatchError("calibrate takes a list of at least one prompt")
    for file in (path, planned):
        _check_folder(file)
    watch, changes = Magnitudes(), Changes()
    constants: tuple[Feature, ...] = (watch, changes) if path is not None or planned is None else ()
    calls = Calls(prompts, arguments)
    recording = Recording(calls) if planned is not None else None
    with handle.also(*constants, *(recording.features if recording is not None else ())):
        for number in range(len(calls)):
            output = calls.run(handle.pipe, number)
            if recording is not None:
                recording.see(number, output)
    result: dict[str, Any] = {
        "model": model_of(handle.sites),
        "measured": {
            "prompts": len(prompts),
            "scheduler": type(handle.pipe.scheduler).__name__,
            "diffusers": diffusers.__version__,
        },
    }
    if constants:
        ratios = _mean(watch.runs)
        result["magcache"] = {"steps": len(ratios[0]) + 1, "ratios": ratios}
        result["teacache"] = fitted(changes.points)
    if path is not None:
        Path(path).expanduser().write_text(yaml.safe_dump(result, sort_keys=False), encoding="utf-8")
    if recording is not None and planned is not None:
        profile = recording.profile(handle)
        profile.save(planned)
        result["planned"] = told(profile)
    return result


def _check_folder(file: str | Path | None) -> None:
    """Before hours of calculation: that there can be a new file there.

    Raises:
        PatchError: there is no such folder, or nothing can be written in it.
    """
    if file is None:
        return
    folder = Path(file).expanduser().parent
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise PatchError(f"calibrate cannot write {str(file)!r}: {folder}: {error.strerror}") from None


def _mean(runs: Sequence[Mapping[int, Sequence[float]]]) -> list[list[float]]:
    """Branch by branch, the mean over the runs.

    Raises:
        PatchError: the runs had other numbers of steps or branches, or too few steps.
    """
    shapes = {tuple((branch, len(ratios)) for branch, ratios in run.items()) for run in runs}
    if len(shapes) != 1 or not all(len(ratios) for ratios in runs[0].values()) or not runs[0]:
        raise PatchError(
            "calibrate needs runs of at least 2 steps, all of the same number of steps and with the same guidance"
        )
    return [[round(sum(values) / len(runs), 5) for values in zip(*(run[branch] for run in runs))] for branch in runs[0]]
