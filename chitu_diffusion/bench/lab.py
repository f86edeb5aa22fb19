"""The lab: one loaded pipeline on which cases are drawn and timed."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from chitu_diffusion.flexcache.constants import read as read_constants
from chitu_diffusion.flexcache.planning.profile import Profile
from chitu_diffusion.runtime import DiffusionTask
from chitu_diffusion.runtime.call import CallPlan, plan_call, read_pictures
from chitu_diffusion.runtime.generator import quiet
from chitu_diffusion.runtime.loading import load_pipeline, model_source, pick_device, pick_dtype
from chitu_diffusion.runtime.metrics import Stopwatch, peak_memory, start_peak_memory, synchronizer
from chitu_hooks import Handle, PatchError, Sites, load_hook_map

from .cases import Case
from .errors import BenchError
from .files import data_folder, write_whole
from .kinds import KINDS, MEASURED, PEERS, Setting
from .quality import Drawn
from .results import content_id
from .watch import Watcher

CALIBRATION = ("a red apple on a blue background", "a castle above a green book on a white background")
"""Prompts on which constants are measured; the bench's own prompts are not used for it."""

OURS = "chitu"
"""Maker of everything that is no peer: our patches come off without a trace."""

Item = tuple[str, int]
"""Prompt and seed of one picture."""


class Lab:
    """A pipeline, loaded anew where a case of another maker follows: peers leave something behind when they are taken off.

    Args:
        task: model, size, guidance and so on; its steps and prompts are those of the cases and items.
        folder: where constants are kept that were measured on this model.
        place: number of this process on its machine, where several work together: that of its GPU.
    """

    def __init__(self, task: DiffusionTask, folder: Path, place: int | None = None) -> None:
        self.task = task
        self.folder = folder
        self.source = model_source(task.model)
        self.device = pick_device(task.device, task.require_gpu, place)
        self.dtype = pick_dtype(task.dtype, self.device)
        self.hook_map = load_hook_map(task.hook_map) if task.hook_map is not None else None
        self.maker = OURS
        self.pipe = load_pipeline(self.source, dtype=self.dtype, device=self.device)
        self.watcher = Watcher()
        self.stale: list[str] = []
        """Names of files of constants that could not be used any more, and were measured again."""
        self._sound: set[Path] = set()
        self._synchronize = synchronizer(torch.device(self.device))

    def plan(self, steps: int | None) -> CallPlan:
        """The arguments of a call of so many steps; raises `RequestError` for what the pipeline cannot do."""
        return plan_call(self.pipe, dataclasses.replace(self.task, steps=steps), read_pictures(self.task))

    def arguments(self, case: Case, items: Sequence[Item]) -> dict[str, Any]:
        """Of one call that draws `items`; a single one is the plainest call there is."""
        arguments = {**self.plan(case.steps).arguments, **KINDS[case.kind].arguments(case)}
        if "output_type" in arguments:
            arguments["output_type"] = "np"
        generators = [torch.Generator("cpu").manual_seed(seed) for _, seed in items]
        if len(items) == 1:
            return {**arguments, "prompt": items[0][0], "generator": generators[0]}
        if isinstance(arguments.get("negative_prompt"), str):
            arguments["negative_prompt"] = [arguments["negative_prompt"]] * len(items)
        return {**arguments, "prompt": [prompt for prompt, _ in items], "generator": generators}

    def prepare(self, case: Case) -> None:
        """Have a pipeline that only cases of the same maker, and baselines for them, have touched."""
        maker = case.kind if case.kind in PEERS else OURS
        if maker != self.maker:
            self.renew()
            self.maker = maker

    def renew(self) -> None:
        """Load the pipeline anew, and let the former one go before: a large model fits only once."""
        del self.pipe
        gc.collect()
        if torch.device(self.device).type == "cuda":
            torch.cuda.empty_cache()
        self.pipe = load_pipeline(self.source, dtype=self.dtype, device=self.device)

    @contextlib.contextmanager
    def on(self, case: Case) -> Iterator[Handle]:
        """The pipeline with `case` on; `prepare` comes before."""
        setting = Setting(pipe=self.pipe, hook_map=self.hook_map, constants=self.constants, profile=self.profile)
        with KINDS[case.kind].on(setting, case) as handle, quiet(self.pipe):
            yield handle

    def draw(
        self, case: Case, items: Sequence[Item], batch: int, on_step: Callable[[int, int], None]
    ) -> tuple[Drawn, dict[str, Any]]:
        """Draw every item, `batch` at a time.

        Args:
            on_step: called after each scheduler step with the first of the pictures that it was for, and how many they are.

        Returns:
            The pictures; and what it took: FLOPs a picture, calls by branch and kind a generation, notes.
        """
        pictures, latents, flops = [], [], 0.0
        calls: dict[str, dict[str, float]] = {}
        generations = math.ceil(len(items) / batch)
        with self.on(case) as handle, self.watcher.at(handle.sites.denoisers), noted() as notes:
            for start in range(0, len(items), batch):
                part = items[start : start + batch]
                self.watcher.on_step = functools.partial(on_step, start, len(part))
                with handle.also(self.watcher):
                    output = self.pipe(**self.arguments(case, part))
                pictures.append(floats_of(output))
                latents.append(self.watcher.latents)
                flops += self.watcher.flops
                for branch, kinds in self.watcher.calls.items():
                    total = calls.setdefault(branch, {})
                    for kind, count in kinds.items():
                        total[kind] = total.get(kind, 0) + count / generations
        drawn = Drawn(torch.cat(pictures), _joined(latents))
        if not bool(torch.isfinite(drawn.pictures).all()):
            raise BenchError("pictures with values that are not finite")
        took = {
            "flops": self.watcher.problem or round(flops / len(items)),
            "calls": {branch: {k: round(v, 2) for k, v in kinds.items()} for branch, kinds in calls.items()},
            "notes": sorted(notes),
        }
        return drawn, took

    def timed(self, case: Case, item: Item) -> dict[str, Any]:
        """Seconds of each stage of one call, its peak memory and the bytes that the case held."""
        watch = Stopwatch(self._synchronize)
        with self.on(case) as handle, noted():
            device = torch.device(self.device)
            start_peak_memory(device)
            with handle.also(watch):
                self.pipe(**self.arguments(case, [item]))
            peak, of = peak_memory(device)
            held = handle.report().bytes_held
        return {
            "seconds": {**watch.seconds, "end_to_end": sum(watch.seconds.values())},
            "peak_memory": None if of == "process" else peak,  # a process's own peak never comes down again
            "bytes_held": held if case.kind == "chitu" else None,
        }

    def measure(self, case: Case) -> None:
        """Have the constants that `case` is to be given, measured on a pipeline that no peer has touched."""
        for key, value in case.params.items():
            path, ask = (self._profile, self.profile) if key == "profile" else (self._constants, self.constants)
            if value == MEASURED and path(case.steps) not in self._sound:
                self.prepare(dataclasses.replace(case, kind="baseline"))
                ask(case.steps)

    def constants(self, steps: int) -> str:
        """The file of constants measured on this model with so many steps; measured at the first asking."""
        path = self._constants(steps)
        return self._calibrated(path, steps, [(prompt, 0) for prompt in CALIBRATION], "path")

    def profile(self, steps: int) -> str:
        """The profile of the planned cache for runs of so many steps; measured at the first asking, on prompts and seeds that
        are nowhere else in the bench."""
        path = self._profile(steps)
        prompts = (data_folder() / "prompts" / "calibration.txt").read_text(encoding="utf-8").splitlines()
        return self._calibrated(path, steps, [(prompt, 1000 + n) for n, prompt in enumerate(prompts)], "planned")

    def _constants(self, steps: int) -> Path:
        return self.folder / f"constants-{steps}-{self._call}.yaml"

    def _profile(self, steps: int) -> Path:
        return self.folder / f"profile-{steps}-{self._call}.safetensors"

    @property
    def _call(self) -> str:
        """A short name for what constants depend on besides model and steps, as a folder may hold results of several calls."""
        task = self.task
        size = task.height, task.width, task.num_frames
        return content_id([size, task.guidance, task.negative_prompt, dict(task.arguments), str(self.dtype)])[:8]

    def _calibrated(self, path: Path, steps: int, items: Sequence[Item], what: str) -> str:
        """`path`, written by a calibration on `items` unless it is there and of use; `what` is the argument that names it."""
        from chitu_diffusion import patch
        from chitu_diffusion.flexcache import calibrate

        if path not in self._sound:
            # Outside of what may be on just now: constants are those of the pipeline as it is.
            with patch(self.pipe, hook_map=self.hook_map) as handle, quiet(self.pipe):
                there = path.is_file()
                if not there or not _usable(path, what, handle.sites):
                    case = Case(kind="baseline", use="", steps=steps, family="baseline")
                    calls = [self.arguments(case, [item]) for item in items]
                    write_whole(path, lambda half: calibrate(handle, calls, **{what: half}))
                    self.stale += [path.name] if there else []
            self._sound.add(path)
        return str(path)


def _usable(path: Path, what: str, sites: Sites) -> bool:
    """Whether a file of constants can be read by this version and is of this model; else it is measured again."""
    try:
        if what == "planned":
            return Profile.load(path).unlike(sites) is None
        read_constants(str(path), "magcache", sites)
    except PatchError:
        return False
    return True


@contextlib.contextmanager
def noted() -> Iterator[set[str]]:
    """What was warned of meanwhile, each once."""
    notes: set[str] = set()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield notes
    notes |= {" ".join(str(w.message).split()) for w in caught if w.category.__name__ == "ChituWarning"}


def floats_of(output: Any) -> torch.Tensor:
    """The pictures that a pipeline returned, (N, H, W, 3) or (N, F, H, W, 3) 32-bit floats from 0 to 1."""
    found = output[0] if isinstance(output, tuple) else next(iter(output.values()))
    return torch.as_tensor(found).float().cpu()


def _joined(latents: list[torch.Tensor | None]) -> torch.Tensor | None:
    parts = [part.float().cpu() for part in latents if part is not None]
    return torch.cat(parts) if len(parts) == len(latents) else None
