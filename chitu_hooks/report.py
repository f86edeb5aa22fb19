"""What `Handle.report` returns: what was asked for, what acts, and what the last generation did."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from .infer import not_inferred

if TYPE_CHECKING:
    from .engine import Engine


@dataclass(frozen=True)
class Report:
    """Plain data; ``str(report)`` is for people, `to_dict` for files."""

    pipeline: str
    hook_map: str
    """Name of the map and how it was found."""
    active: bool
    """False after `undo`."""
    sites: dict[str, int]
    """Number of denoisers, stacks, blocks and attention layers found."""
    unreachable: list[str]
    """Attention layers that the seam cannot intercept."""
    features: list[dict[str, Any]]
    """Per feature: name, exactness, and what it reports itself."""
    branches: dict[str, dict[str, int]]
    """Last generation: denoiser/branch -> calls computed, skipped and replaced, and those left to another rank."""
    steps: int | None
    """Last generation: schedule positions that ran."""
    bytes_held: int
    """Last generation: most bytes that branches and features held at the end of a schedule."""
    still_runs: list[str]
    """What a skipped step still runs: everything of the denoiser outside its stacks."""
    notes: list[str] = field(default_factory=list)
    """Fallbacks and why; things that were left behind by `undo`."""
    not_inferred: list[str] = field(default_factory=list)
    """What an inferred map does not say, each with the line of a map that would say it."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.pipeline}: hook map {self.hook_map}{'' if self.active else ' (undone)'}"]
        lines.append("  sites      " + ", ".join(f"{count} {name}" for name, count in self.sites.items()))
        if self.unreachable:
            lines.append(f"  out of reach of the attention seam: {', '.join(self.unreachable)}")
        for feature in self.features or [{"name": "none", "exactness": "exact"}]:
            detail = ", ".join(f"{k} {v}" for k, v in feature.items() if k not in ("name", "exactness"))
            lines.append(f"  feature    {feature['name']} ({feature['exactness']})" + (f": {detail}" if detail else ""))
        for branch, calls in self.branches.items():
            lines.append(
                f"  branch     {branch}: " + ", ".join(f"{count} {kind}" for kind, count in calls.items() if count)
            )
        if self.bytes_held:
            lines.append(f"  held       {self.bytes_held / 2**20:.1f} MiB")
        if self.still_runs and any(calls["skipped"] for calls in self.branches.values()):
            lines.append(f"  a skipped step still runs {', '.join(self.still_runs)}")
        lines += [f"  note       {note}" for note in self.notes]
        if self.not_inferred:
            lines.append(
                "  not inferred, and only needed by caches of fewer tokens and by ranks; `chitu adapt` writes a map:"
            )
            lines += [f"    {line}" for line in self.not_inferred]
        return "\n".join(lines)


def make_report(engine: Engine, active: bool) -> Report:
    """The report of `engine`, about its last generation if there was one."""
    sites, last = engine.sites, engine.last
    hook_map = engine.hook_map
    unresolved = [
        f"{stack.denoiser.name}.{stack.path}: streams not known, its blocks are always run; write them: "
        f"Stack({stack.path!r}, streams={{role: argument}}, returns=(role,))"
        for stack in sites.stacks
        if last is not None and engine.hooks_blocks and stack.returns is None
    ]
    return Report(
        pipeline=type(sites.pipe).__name__,
        hook_map=f"{hook_map.name!r} ({hook_map.source})",
        active=active,
        sites={
            "denoisers": len(sites.denoisers),
            "stacks": len(sites.stacks),
            "blocks": len(sites.blocks),
            "attention layers": len(sites.attention),
        },
        unreachable=[site.path for site in sites.attention if not site.reachable],
        features=[{"name": f.name, "exactness": f.exactness, **f.report()} for f in engine.features],
        branches={f"{d}/{name}": dict(calls) for (d, name), calls in last.tally.items()} if last else {},
        steps=last.positions if last else None,
        bytes_held=last.peak_bytes if last else 0,
        still_runs=_outside_stacks(engine) if any(f.skips_trunk for f in engine.features) else [],
        notes=[*(last.notes if last else ()), *unresolved, *engine.left_behind],
        not_inferred=not_inferred(sites, hook_map),
    )


def _outside_stacks(engine: Engine) -> list[str]:
    denoiser = engine.sites.denoisers[0]
    stacks = {stack.path.split(".")[0] for stack in denoiser.stacks}
    return [name for name, _ in denoiser.inner.named_children() if name not in stacks]
