"""What ``chitu inspect`` finds: the target, the map in use, the sites, the gap report and a draft of the map."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from chitu_diffusion.adapters import registry
from chitu_diffusion.runtime import DiffusionTask
from chitu_hooks import HookMap, Sites
from chitu_hooks.find import find_hook_map
from chitu_hooks.sites import find_sites

from .draft import Draft, map_text, read_draft
from .gap import Gap, gap_report
from .run import runner
from .target import Target, find_target
from .trial import complete

SMALL = DiffusionTask(prompts=("a red apple on a blue background",), steps=2)


@dataclass(frozen=True)
class Inspection:
    """One pipeline, looked at."""

    target: Target
    hook_map: HookMap
    sites: Sites
    gap: Gap
    draft: Draft | None
    """For an inferred map: the map that could be stored, and what is open about it."""
    seen: bool
    """Whether the draft was seen in a call, and not only read from the source."""

    @property
    def map_text(self) -> str | None:
        """The draft as the text of an adapter file."""
        if self.draft is None:
            return None
        how = "seen in a call" if self.seen else "read from the source, not seen in a call"
        return map_text(self.draft, f"{type(self.target.pipe).__name__}; streams and token order {how}.")

    def rows(self) -> list[dict[str, Any]]:
        """The sites as plain data: denoisers, stacks, and attention layers by processor class."""
        return [row for denoiser in self.sites.denoisers for row in _rows(denoiser)]

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.target.word,
            "kind": self.target.kind,
            "pipeline": type(self.target.pipe).__name__,
            "hook_map": {"name": self.hook_map.name, "source": self.hook_map.source, "seen": self.seen},
            "sites": self.rows(),
            "gap": self.gap.to_dict(),
            "draft": self.map_text,
            "questions": list(self.draft.questions) if self.draft is not None else [],
        }


def inspect_model(word: str | None, hook_map: str | None = None) -> Inspection:
    """Look at the pipeline that `word` stands for, see `find_target`; weights are neither needed nor loaded.

    Args:
        word: an id, a folder, a pipeline class or a Python file; None is the embedded model.
        hook_map: path of a map to use in place of the registry's or an inferred one.

    Raises:
        ChituError: the model cannot be read, or no map fits it.
    """
    return inspect_target(find_target(word), hook_map)


def inspect_target(
    target: Target, hook_map: str | None = None, task: DiffusionTask = SMALL, name: str | None = None
) -> Inspection:
    """Look at `target`. A pipeline that can be called is called, if nobody has written a map for it.

    Args:
        target: the pipeline.
        hook_map: path of a map to use in place of the registry's or an inferred one.
        task: how a pipeline with text encoders is called.
        name: of a map that is drafted; the target's own if None.
    """
    found = find_hook_map(target.pipe, hook_map, registry())
    draft, seen = None, False
    if found.source == "inferred":
        draft = read_draft(target.pipe, found, name or target.name)
        run = runner(target, task)
        if run is not None:
            draft, seen = complete(target.pipe, draft, run), True
        found = draft.hook_map
    sites = find_sites(target.pipe, found)
    return Inspection(target, found, sites, gap_report(target.pipe, target.classes, sites), draft, seen)


def _rows(denoiser: Any) -> list[dict[str, Any]]:
    rows = [{"site": denoiser.name, "kind": "denoiser", "count": 1, "what": type(denoiser.inner).__name__, "note": ""}]
    for stack in denoiser.stacks:
        kinds = ", ".join(dict.fromkeys(type(block.module).__name__ for block in stack.blocks))
        streams = ", ".join(f"{role} {name}" for role, name in (stack.streams or {}).items()) or "streams not known"
        note = streams + (", refiner" if stack.refiner else "")
        rows.append(
            {
                "site": f"{denoiser.name}.{stack.path}",
                "kind": "stack",
                "count": len(stack.blocks),
                "what": kinds,
                "note": note,
            }
        )
    layers = Counter((type(site.module.processor).__name__, site.reachable) for site in denoiser.attention)
    for (processor, reachable), count in layers.items():
        note = "" if reachable else "out of reach of the attention seam"
        rows.append({"site": denoiser.name, "kind": "attention", "count": count, "what": processor, "note": note})
    return rows
