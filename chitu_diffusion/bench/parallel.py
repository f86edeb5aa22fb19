"""``chitu bench parallel``: one picture on one process and on several, in every mode, with the same seed and prompt.

Each mode first has to give the picture of one process. Then they take turns, one picture a call, a warm-up round dropped.
One rank of several stands for all: they begin together, and each step ends with an exchange. diffusers' own parallelism
cannot be taken off, so its modes come last, each on a pipeline of its own, and one process is timed once more at the end.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from chitu_diffusion.evaluation.pictures import relative_l2
from chitu_diffusion.runtime import DiffusionTask
from chitu_diffusion.runtime.generator import quiet
from chitu_diffusion.runtime.metrics import Stopwatch as Stages
from chitu_diffusion.runtime.metrics import synchronizer
from chitu_hooks import Handle

from .books import model_content
from .compiled import compile_blocks
from .errors import BenchError, one_line
from .kernel_kinds import exchange_seconds
from .lab import Lab, noted
from .meter import Meter
from .parallel_call import Watch, default_steps, guided
from .parallel_modes import OURS, Mode, on, parallel_modes, peer_modes, singles
from .plan import baseline_case
from .results import FORMAT, Results, code_digest, content_id
from .timing import circumstances
from .turns import spread

KIND = "parallel"
STAGES = ("encode", "denoise", "decode", "end_to_end")
TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.05}
"""Largest relative difference (2-norm of the last latents) between a mode and one process."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a bench is to do, on as many ranks as this process is one of."""

    task: DiffusionTask
    """Model, one prompt, its seed, size, steps."""
    output: Path
    repeats: int = 3
    attention: str | None = None
    """Kernel of ours in every mode of ours."""
    compiled: bool = False
    """Compile the repeated blocks."""
    peers: bool = True
    only: tuple[str, ...] = ()
    """Words, one of which is in the name of a mode that is to be run; empty for all."""


class Bench:
    """One rank of a bench. Only the first rank reads and writes results.

    Args:
        place: number of this rank on its machine.
        meter: of the first rank; it counts pictures.
    """

    def __init__(self, plan: Plan, place: int, meter: Meter | None) -> None:
        self.plan = plan
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.meter = meter
        self.lab = Lab(plan.task, plan.output, place)
        self.device = torch.device(self.lab.device)
        self.cores = (os.cpu_count() or 1) if self.device.type == "cpu" else None
        self.guided = guided(self.lab, plan.task)
        self.results = Results(plan.output, KIND) if self.rank == 0 else None
        self.found = circumstances(self.device)
        self.code = code_digest("attention", "parallel")
        self.expected: torch.Tensor | None = None
        self.baseline = self._baseline()

    # -- the books -------------------------------------------------------------------------------------------------

    def _baseline(self) -> dict[str, Any]:
        """What all modes have in common: one picture of one model on one kind of machine."""
        task = self.plan.task
        content = {
            **model_content(self.lab, self.found),
            "prompt": task.prompts[0],
            "seed": task.seed,
            "steps": self.steps,
            "cores": self.cores,
            "compiled": self.plan.compiled,
        }
        return {"format": FORMAT, "id": content_id(content), "content": content, **self.found}

    @property
    def steps(self) -> int:
        arguments = self.lab.plan(self.plan.task.steps).arguments
        return int(arguments.get("num_inference_steps") or default_steps(self.lab.pipe))

    def record(self, mode: Mode) -> dict[str, Any]:
        """The record of a mode, without its numbers."""
        ranks = 1 if mode.single else self.ranks
        content = {"mode": mode.content(), "ranks": ranks, "baseline": self.baseline["id"]}
        if mode.maker == OURS:
            content["code"] = self.code
        return {
            "format": FORMAT,
            "id": content_id(content),
            "number": ranks,
            "baseline": self.baseline["id"],
            "case": {**mode.content(), "ranks": ranks},
            **self.found,
        }

    def open_modes(self, modes: list[Mode]) -> list[Mode]:
        """Those that are asked for and not stored, as the first rank sees it; a mode that failed is tried again."""
        names: list[Any] = [None]
        if self.results is not None:
            wanted = [m for m in modes if not self.plan.only or any(word in m.name for word in self.plan.only)]
            stored = {mode.name: self.results.case(self.record(mode)["id"]) for mode in wanted}
            names = [[mode.name for mode in wanted if (stored[mode.name] or {"error": ""})["error"] is not None]]
        dist.broadcast_object_list(names)
        return [mode for mode in modes if mode.name in names[0]]

    def tell(self, line: str) -> None:
        if self.meter is not None:
            self.meter.tell(line)

    # -- one call --------------------------------------------------------------------------------------------------

    def once(self, handle: Handle) -> dict[str, Any]:
        """Draw the picture: seconds of each stage, milliseconds of each step, the last latents."""
        stages, watch = Stages(synchronizer(self.device)), Watch(self.device)
        item = (self.plan.task.prompts[0], self.plan.task.seed)
        with handle.also(stages, watch), quiet(self.lab.pipe), noted() as notes:
            self.lab.pipe(**self.lab.arguments(baseline_case(self.steps), [item]))
        laps = watch.marks.laps()
        return {
            "seconds": {**stages.seconds, "end_to_end": sum(stages.seconds.values())},
            # The first step of guidance on ranks runs every branch on each.
            "ms": statistics.median(laps[1:] or laps),
            "latents": watch.latents,
            "notes": sorted(notes),
        }

    def together(self, mode: Mode, work: Callable[[Handle], Any]) -> tuple[Any, str | None]:
        """`work` with `mode` on, on every rank or, for one process, on the first; and why it failed somewhere."""
        found, error = None, None
        if self.meter is not None:
            self.meter.at(mode.name)
        dist.barrier()
        if self.rank == 0 or not mode.single:
            try:
                with on(mode, self.lab.pipe, self.lab.hook_map) as handle:
                    found = work(handle)
            except Exception as failure:  # a mode that fails is a result, and the next one runs
                error = one_line(failure)
        errors: list[Any] = [None] * self.ranks
        dist.all_gather_object(errors, error)
        if self.meter is not None:
            self.meter.advance(1)
        return found, next((text for text in errors if text is not None), None)

    # -- the parts -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Measure and store what is not stored yet."""
        ours = self.open_modes(parallel_modes(self.ranks, self.guided, self.plan.attention))
        peers = self.open_modes(peer_modes(self.ranks)) if self.plan.peers else []
        if not ours and not peers:
            return
        if self.results is not None:
            self.results.put_baseline(self.baseline)
        alone = singles(self.plan.attention, self.cores)
        if self.meter is not None:
            self.meter.expect((len(alone) + len(ours) + len(peers) + bool(peers)) * (self.plan.repeats + 2))
        self.compile()
        times = self.turns([*alone, *ours])
        fastest = min((m for m in alone if m.name in times), key=lambda m: ms_of(times[m.name]), default=None)
        if fastest is None:
            raise BenchError("one process could not draw the picture, so there is nothing to compare with")
        for mode in [*alone, *ours]:
            if mode.name in times:
                self.store(mode, times[mode.name], fastest, times[fastest.name])
        for mode in peers:
            self.renew()
            found = self.turns([mode])
            if mode.name in found:
                self.store(mode, found[mode.name], fastest, times[fastest.name])
        if peers:
            self.renew()
            again = self.turns([fastest]).get(fastest.name)
            if again is not None:
                before = ms_of(times[fastest.name])
                self.tell(f"{fastest.name}, once more: {ms_of(again):.1f} ms a step, {before:.1f} before")

    def renew(self) -> None:
        """A pipeline that nothing has touched."""
        self.lab.renew()
        self.compile()

    def compile(self) -> None:
        if self.plan.compiled:
            compile_blocks(self.lab.pipe, self.lab.hook_map)

    def turns(self, modes: list[Mode]) -> dict[str, list[dict[str, Any]]]:
        """Check each mode, then time those that passed, one call each a round; mode -> its calls, the first with more."""
        checked: dict[str, dict[str, Any]] = {}
        for mode in modes:
            found = self.check(mode)
            if found is not None:
                checked[mode.name] = found
        rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in checked}
        for turn in range(-1, self.plan.repeats):
            for mode in (m for m in modes if m.name in rounds):
                work: Any = self.timed if turn >= 0 else self.profiled
                found, error = self.together(mode, lambda handle, mode=mode, work=work: work(mode, handle))  # type: ignore[misc]
                if error is not None:
                    self.fail(mode, error)
                    del rounds[mode.name]
                elif turn >= 0:
                    rounds[mode.name].append(found or {})
                else:
                    checked[mode.name] |= found or {}
        told: list[Any] = [{name: [{**calls[0], **checked[name]}, *calls[1:]] for name, calls in rounds.items()}]
        dist.broadcast_object_list(told)  # those of the first rank: it has timed all modes
        return told[0]

    def timed(self, mode: Mode, handle: Handle) -> dict[str, Any]:
        if self.plan.compiled:
            self.once(handle)  # what the hooks changed is compiled here
        if not mode.single:
            dist.barrier()
        found = self.once(handle)
        return {key: found[key] for key in ("seconds", "ms")}

    def check(self, mode: Mode) -> dict[str, Any] | None:
        """How far the picture of `mode` is off that of one process, and what its features tell; None: it failed."""
        found, error = self.together(mode, self.reported)
        if error is not None:
            self.fail(mode, error)
            return None
        mine = found["latents"].float().cpu() if found else None
        everyone: list[Any] = [None] * self.ranks
        dist.all_gather_object(everyone, mine)
        if self.expected is None:
            self.expected = everyone[0]
        every = [relative_l2(latents, self.expected) for latents in everyone if latents is not None]
        off = next((value for value in every if not math.isfinite(value)), max(every))
        if not off <= TOLERANCE[self.lab.dtype]:  # nor is what is not a number
            self.fail(mode, f"the picture is not that of one process: latents differ by {off:.2g} (2-norm, relative)")
            return None
        self.tell(f"checked {mode.name}: off by {off:.1g}")
        return {"off": off, **({key: found[key] for key in ("features", "notes")} if found else {})}

    def reported(self, handle: Handle) -> dict[str, Any]:
        found = self.once(handle)
        if found["latents"] is None:
            raise BenchError(
                f"{type(self.lab.pipe).__name__} ended without a scheduler step, so there is nothing to compare"
            )
        found["features"] = [_plain(feature) for feature in handle.report().to_dict()["features"]]
        return found

    def profiled(self, mode: Mode, handle: Handle) -> dict[str, Any]:
        """The warm-up: which share of denoising goes into exchanges."""
        if self.plan.compiled:
            self.once(handle)
        found, seconds = exchange_seconds(lambda: self.once(handle), self.device.type == "cuda")
        share = seconds / found["seconds"]["denoise"]
        return {"exchange_share": 0.0 if mode.single else min(share, 1.0)}

    def fail(self, mode: Mode, error: str) -> None:
        """Store that `mode` failed, and how."""
        self.tell(f"failed ({error}) {mode.name}")
        if self.results is not None:
            self.results.put_case({**self.record(mode), "error": error, "timing": None})

    def store(self, mode: Mode, calls: list[dict[str, Any]], fastest: Mode, alone: list[dict[str, Any]]) -> None:
        """Store the numbers of `mode`, and its speed-up over the fastest single process of the same run."""
        if self.results is None:
            return
        ms, seconds = ms_of(alone), statistics.median(call["seconds"]["end_to_end"] for call in alone)
        first = calls[0]
        denoise = [call["seconds"]["denoise"] for call in calls]
        timing: dict[str, Any] = {
            "ms_step": spread([call["ms"] for call in calls]),
            "seconds": {stage: spread([call["seconds"][stage] for call in calls]) for stage in STAGES},
            "exchange": float(f"{first['exchange_share'] * statistics.median(denoise):.5g}"),
            "speedup": {
                "step": spread([ms / call["ms"] for call in calls]),
                "end_to_end": spread([seconds / call["seconds"]["end_to_end"] for call in calls]),
            },
            "against": {"name": fastest.name, "ms_step": ms, "end_to_end": seconds},
        }
        record = {
            **self.record(mode),
            "error": None,
            "off": first["off"],
            "features": first["features"],
            "notes": first["notes"],
            "threads": mode.threads or (torch.get_num_threads() if self.cores else None),
            "timing": timing,
        }
        self.results.put_case(record)
        self.tell(
            f"timed {mode.name}: {timing['ms_step']['median']:.1f} ms a step, "
            f"{timing['speedup']['step']['median']:.2f}× of {fastest.name}"
        )


def ms_of(calls: list[dict[str, Any]]) -> float:
    return statistics.median(call["ms"] for call in calls)


def _plain(value: Any) -> Any:
    """Plain data without what is only of this process."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
