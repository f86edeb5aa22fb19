"""The books of a bench of caches: its baselines, the record of every case, and what is still to be measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .cases import Case
from .kinds import KINDS, OURS, PEERS
from .lab import Lab
from .plan import Plan
from .results import FORMAT, Results, code_digest, content_id, model_digest
from .timing import circumstances

Open = tuple[Case, dict[str, Any]]
"""A case and its record, as far as it has been measured."""

GROUP = 4
"""Cases of one group, for an estimate of the work: each group has its own calls of the baseline."""

COMPARED = ("torch", "diffusers", "transformers")
"""Packages whose version is part of what a baseline is."""


class Books:
    """Records of what `plan` asks for, from the results folder where they are there.

    Args:
        plan: cases, prompts, seeds and the folder.
        lab: the loaded pipeline.
    """

    def __init__(self, plan: Plan, lab: Lab) -> None:
        self.plan = plan
        self.lab = lab
        self.results = Results(plan.output)
        self.circumstances = circumstances(torch.device(lab.device))
        self.code = {kind: code_digest(package) for kind, package in OURS.items()}
        self.steps = sorted({case.steps for case in plan.cases})
        self.baselines = {steps: self._baseline(steps) for steps in self.steps}

    def _baseline(self, steps: int) -> dict[str, Any]:
        """The record of the baseline with so many steps."""
        content = {**self.content, "steps": steps}
        name = content_id(content)
        stored = self.results.baseline(name)
        return stored or {
            "format": FORMAT,
            "id": name,
            "content": content,
            "prompts": list(self.plan.task.prompts),
            "arguments": self.lab.plan(steps).to_json()["arguments"],
            **self.circumstances,
            "took": None,
            "timing": None,
        }

    @property
    def content(self) -> dict[str, Any]:
        """Everything that the baseline's pictures and times depend on, besides the number of steps."""
        task = self.plan.task
        return {
            **model_content(self.lab, self.circumstances),
            "prompts": content_id(list(task.prompts)),
            "pictures": len(self.plan.items),
            "seeds": list(self.plan.seeds),
        }

    def record(self, number: int, case: Case) -> dict[str, Any]:
        """The record of a case as far as it has been measured; a case that failed in another run is tried again."""
        content: dict[str, Any] = {"case": case.content(), "baseline": self.baselines[case.steps]["id"]}
        kind = KINDS[case.kind]
        if case.kind in OURS:
            content["code"] = self.code[case.kind]
        elif kind.package is not None:
            content["package"] = version_of(kind.package)
        name = content_id(content)
        stored = self.results.case(name)
        fresh = {"quality": None, "timing": None, "error": None}
        keep = stored is not None and (stored["error"] is None or stored["run"] == self.plan.run)
        found = stored if stored is not None and keep else fresh
        return {
            "format": FORMAT,
            "id": name,
            "number": number,
            "run": self.plan.run,
            "baseline": content["baseline"],
            "case": case.to_json(),
            **{key: found[key] for key in fresh},
            **({key: found[key] for key in self.circumstances} if found is not fresh else self.circumstances),
        }

    def open_cases(self, part: str) -> list[Open]:
        """Cases that lack `part`, `quality` or `timing`."""
        found = []
        for number, case in enumerate(self.plan.cases):
            record = self.record(number, case)
            missing = KINDS[case.kind].missing()
            if missing is not None:
                record["error"] = missing
                self.results.put_case(record)
            elif record["error"] is None and record[part] is None:
                found.append((case, record))
        return found

    def batch_of(self, case: Case) -> int:
        """Pictures a call: one where a decision about one picture would depend on the others."""
        return 1 if KINDS[case.kind].coupled(case) else min(self.plan.batch, len(self.plan.items))

    def drawn_name(self, steps: int, batch: int) -> str:
        """Under which a baseline's pictures are stored: kernels round otherwise with another number of pictures a call."""
        return f"{self.baselines[steps]['id']}-{batch}"

    def has_baseline(self, steps: int, batch: int) -> bool:
        """Whether it has been drawn, by whichever process."""
        if not self.results.has_drawn(self.drawn_name(steps, batch)):
            return False
        record = self.baselines[steps]
        if record["took"] is None:
            self.baselines[steps] = record = self.results.baseline(record["id"]) or record
        return record["took"] is not None

    def open_baselines(self, cases: Iterable[Case]) -> list[tuple[int, int]]:
        """(steps, pictures a call) of the baselines that `cases` are compared with and that are not drawn."""
        needed = {(case.steps, self.batch_of(case)) for case in cases}
        return [one for one in sorted(needed) if not self.has_baseline(*one)]

    def work(self) -> int:
        """Scheduler steps of single pictures that are to be done."""
        turns = (self.plan.repeats + 1) * self.plan.timed
        timing, quality = self.open_cases("timing"), self.open_cases("quality")
        timed = sum(case.steps * turns for case, _ in timing)
        timed += sum(group[0][0].steps * turns for group in groups_of(timing, lambda steps: GROUP))
        drawn = sum(case.steps for case, _ in quality)
        drawn += sum(steps for steps, _ in self.open_baselines(case for case, _ in quality))
        return timed + drawn * len(self.plan.items)


def model_content(lab: Lab, found: dict[str, Any]) -> dict[str, Any]:
    """What pictures and times of the loaded pipeline depend on: the model, its call, machine and versions.

    Args:
        found: `timing.circumstances`.
    """
    pipe, task, source = lab.pipe, lab.task, lab.source
    scheduler = pipe.scheduler
    return {
        "model": model_digest(source) if isinstance(source, Path) else source,
        "name": "embedded" if task.model is None else Path(task.model).name,
        "pipeline": type(pipe).__name__,
        "scheduler": [type(scheduler).__name__, {k: repr(v) for k, v in sorted(scheduler.config.items())}],
        "dtype": str(pipe.dtype).removeprefix("torch."),
        "device": torch.device(lab.device).type,
        "guidance": task.guidance,
        "size": [task.height, task.width, task.num_frames],
        "negative_prompt": task.negative_prompt,
        "arguments": dict(task.arguments),
        "machine": found["machine"],
        "versions": {k: v for k, v in found["versions"].items() if k in COMPARED},
    }


def groups_of(waiting: list[Open], most: Callable[[int], int]) -> Iterator[list[Open]]:
    """Cases that take turns with one another: of one number of steps and one maker.

    Args:
        most: number of steps -> how many cases there may be in the next group; 0 ends it all.
    """
    makers = {kind: kind if kind in PEERS else "" for kind in KINDS}
    ordered = sorted(waiting, key=lambda entry: (list(KINDS).index(entry[0].kind), entry[0].steps))
    by_turn: dict[tuple[str, int], list[Open]] = {}
    for entry in ordered:
        by_turn.setdefault((makers[entry[0].kind], entry[0].steps), []).append(entry)
    for (_, steps), group in by_turn.items():
        while group:
            count = most(steps)
            if not count:
                return
            yield group[:count]
            group = group[count:]


def version_of(package: str) -> str | None:
    """The installed version of a distribution."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
