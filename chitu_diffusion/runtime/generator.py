"""`Generator`: a loaded and hooked pipeline that turns tasks into pictures, and keeps the books."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from chitu_diffusion.parallel.environment import find_world
from chitu_diffusion.parallel.share import load_once
from chitu_hooks import Feature, Handle, load_hook_map

from .call import CallPlan, plan_call, read_pictures
from .errors import RequestError
from .loading import load_pipeline, model_source, pick_device, pick_dtype
from .metrics import FlopMeter, Metrics, Stopwatch, peak_memory, start_peak_memory, synchronizer
from .stages import Stages
from .task import DiffusionTask

CHECKS = ("check_inputs", "retrieve_timesteps", "check_image", "check_image_size")
"""Functions of diffusers in which a pipeline looks at what it was given: a `ValueError` from there is the request's."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """One picture, or one clip."""

    prompt: str
    frames: list[Any]
    """Pillow pictures; one of them for a picture."""
    fps: float | None = None
    """Frames per second; None for a picture."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of one task."""

    task: DiffusionTask
    """With the defaults filled in."""
    plan: CallPlan
    items: list[Item]
    reports: list[dict[str, Any]]
    """`Handle.report` of every call, as plain data."""
    metrics: Metrics
    pipeline: str
    """Class of the pipeline."""


class Generator:
    """A hooked pipeline.

    Args:
        handle: what `patch` returned.
        load_seconds: how long loading took, for the metrics.
        watchers: exact features that look on, such as a progress bar.
    """

    def __init__(self, handle: Handle, *, load_seconds: float = 0.0, watchers: tuple[Feature, ...] = ()) -> None:
        self.handle = handle
        self.load_seconds = load_seconds
        self.watchers = watchers

    @classmethod
    def load(cls, task: DiffusionTask, *, watchers: tuple[Feature, ...] = ()) -> Generator:
        """Load and hook the pipeline of `task`. What can be checked without loading is checked first.

        Raises:
            LoadError: no such model, half a model, no such device or dtype.
            RequestError: an input picture that cannot be read.
            ChituError: an unknown cache, kernel or parameter, or one that cannot act on this pipeline.
        """
        chosen = choose(task)
        source = model_source(task.model)
        read_pictures(task)
        place = local_rank() if task.ranks > 1 else None
        device = pick_device(task.device, task.require_gpu, place)
        dtype = pick_dtype(task.dtype, device)
        started = time.perf_counter()
        if place is None or device == "cpu":  # there, the ranks share the pages of the files that they map
            pipe = load_pipeline(source, dtype=dtype, device=device)
        else:
            pipe = load_once(lambda: load_pipeline(source, dtype=dtype, device="cpu"), device, place)
        handle = hook(pipe, chosen)
        synchronizer(torch.device(device))()
        return cls(handle, load_seconds=time.perf_counter() - started, watchers=watchers)

    @property
    def pipe(self) -> Any:
        return self.handle.pipe

    def plan(self, task: DiffusionTask) -> CallPlan:
        """The arguments of the calls of `task`.

        Raises:
            RequestError: see `plan_call`.
        """
        return plan_call(self.pipe, task, read_pictures(task))

    def generate(self, task: DiffusionTask) -> Result:
        """Run `task`: one call per prompt.

        Raises:
            RequestError: an option does not fit the pipeline. Nothing was run.
        """
        plan = self.plan(task)
        device = self.pipe._execution_device
        metrics = Metrics()
        metrics.seconds["load"] = self.load_seconds
        items: list[Item] = []
        reports = []
        watch, meter = Stopwatch(synchronizer(device)), FlopMeter()  # the meter counts each shape once for all prompts
        start_peak_memory(device)
        for prompt in task.prompts:
            with self.handle.also(watch, meter, *self.watchers), quiet(self.pipe):
                output = call(self.pipe, prompt, task.seed, plan)
            items += items_of(output, prompt, plan.fps)
            reports.append({"prompt": prompt, **self.handle.report().to_dict()})
            _add(metrics, watch, meter)
        metrics.peak_memory, metrics.peak_memory_of = peak_memory(device)
        return Result(
            task=task, plan=plan, items=items, reports=reports, metrics=metrics, pipeline=type(self.pipe).__name__
        )

    def stages(self, task: DiffusionTask) -> Stages:
        """The call for the first prompt of `task`, to be taken a stage at a time.

        Raises:
            RequestError: an option does not fit the pipeline.
        """
        plan = self.plan(task)
        return Stages(self.handle, **arguments_of(task.prompts[0], task.seed, plan))

    def close(self) -> None:
        """Take the hooks off."""
        self.handle.undo()

    def __enter__(self) -> Generator:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def choose(task: DiffusionTask) -> dict[str, Any]:
    """The words of `task` as arguments of `patch`; raises a `ChituError` for a word that is not known."""
    from chitu_diffusion.attention import make_attention
    from chitu_diffusion.flexcache import make_params

    if task.attention is not None:
        make_attention(task.attention)
    cache = make_params(task.cache, task.cache_args) if task.cache is not None else None
    hook_map = load_hook_map(task.hook_map) if task.hook_map is not None else None
    return {"attention": task.attention, "cache": cache, "hook_map": hook_map, "parallel": _parallel(task)}


def _parallel(task: DiffusionTask) -> Any:
    """The degrees that were asked for; with ``nproc`` alone, what fits the pipeline."""
    from chitu_diffusion.parallel import Parallel

    if task.ranks == 1:
        return None
    if not (task.cfg_parallel or task.ulysses or task.ring or task.gather):
        return "auto"
    return Parallel(
        cfg=task.cfg_parallel or 1,
        ulysses=task.ulysses or 1,
        ring=task.ring or 1,
        gather=task.gather or 1,
        overlap=task.overlap if task.overlap is not None else "auto",
        prompt=task.encode_prompt or "once",  # type: ignore[arg-type]
    )


def local_rank() -> int:
    """Number of this process on this machine, as its launcher has it."""
    world = find_world()
    return world.local_rank if world is not None else 0


def hook(pipe: Any, chosen: dict[str, Any]) -> Handle:
    """`patch` of the package, see `choose`."""
    from chitu_diffusion import patch

    return patch(pipe, **chosen)


def with_defaults(task: DiffusionTask) -> DiffusionTask:
    """`task` with the recommended call filled in, if it is for the embedded model."""
    from chitu_diffusion.demo import DEFAULTS, model_folder

    embedded = task.model is None or Path(task.model).expanduser().resolve() == model_folder()
    return task.filled(DEFAULTS) if embedded else task


def arguments_of(prompt: str, seed: int, plan: CallPlan) -> dict[str, Any]:
    """All arguments of one call. The generator lives on the CPU, so that a seed means the same on every device."""
    return dict(plan.arguments, prompt=prompt, generator=torch.Generator("cpu").manual_seed(seed))


def call(pipe: Any, prompt: str, seed: int, plan: CallPlan) -> Any:
    """``pipe(...)``.

    Raises:
        RequestError: the pipeline looked at its arguments and refused them.
    """
    try:
        return pipe(**arguments_of(prompt, seed, plan))
    except (ValueError, TypeError) as error:
        names = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
        if names.isdisjoint(CHECKS):
            raise
        raise RequestError(f"{type(pipe).__name__} refuses the request: {' '.join(str(error).split())}") from error


def items_of(output: Any, prompt: str, fps: float | None) -> list[Item]:
    """The pictures or clips in what a pipeline returned."""
    found = output[0] if isinstance(output, tuple) else next(iter(output.values()))
    items = []
    for entry in found if isinstance(found, (list, tuple)) else [found]:
        if isinstance(entry, (list, tuple)) and fps is not None:
            items.append(Item(prompt=prompt, frames=list(entry), fps=fps))
        else:
            pictures = entry if isinstance(entry, (list, tuple)) else [entry]
            items += [Item(prompt=prompt, frames=[picture]) for picture in pictures]
    return items


@contextlib.contextmanager
def quiet(pipe: Any) -> Iterator[None]:
    """Without the pipeline's own progress bar; its setting comes back afterwards."""
    absent = object()
    before = vars(pipe).get("_progress_bar_config", absent)
    pipe.set_progress_bar_config(**{**(before if isinstance(before, dict) else {}), "disable": True})
    try:
        yield
    finally:
        if before is absent:
            del pipe._progress_bar_config
        else:
            pipe._progress_bar_config = before


def _add(metrics: Metrics, watch: Stopwatch, meter: FlopMeter) -> None:
    for stage, seconds in watch.seconds.items():
        metrics.seconds[stage] += seconds
    metrics.steps += watch.steps
    for name, value in meter.flops.items():
        before = metrics.flops.get(name, 0)
        metrics.flops[name] = value if isinstance(value, str) or isinstance(before, str) else before + value


def used(task: DiffusionTask, handle: Handle) -> DiffusionTask:
    """`task` with the device and dtype that came of ``auto``."""
    pipe = handle.pipe
    return dataclasses.replace(task, device=str(pipe._execution_device), dtype=str(pipe.dtype).removeprefix("torch."))
