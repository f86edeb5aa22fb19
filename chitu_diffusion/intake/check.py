"""Does a hook map do what it says? The checks that ``chitu adapt`` makes, and that the test it writes repeats."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chitu_hooks import HookMap, load_hook_map
from chitu_hooks.find import find_hook_map
from chitu_hooks.sites import find_sites

from .target import find_target


@dataclass(frozen=True)
class Check:
    """One thing that was tried."""

    name: str
    passed: bool
    detail: str

    def __str__(self) -> str:
        return f"{self.name}: {self.detail}"


def check_map(pipe: Any, hook_map: HookMap, run: Callable[[], Any] | None) -> list[Check]:
    """Check `hook_map` on `pipe`: that it fits and, if `run` makes a call, that the hooked call is the unhooked one.

    Raises:
        HookMapError: a name in the map is not in the pipeline.
    """
    found = find_hook_map(pipe, hook_map, ())
    sites = find_sites(pipe, found)
    counts = (len(sites.denoisers), len(sites.stacks), len(sites.blocks), len(sites.attention))
    checks = [Check("fits", True, "denoisers {}, stacks {}, blocks {}, attention layers {}".format(*counts))]
    if run is not None:
        checks += _exact(pipe, found, run)
        if sites.blocks:
            checks.append(_skips(pipe, found, run))
    return checks


def check_adapter(path: str | Path, model: str) -> list[str]:
    """What a test of an adapter asserts to be empty: the checks that fail.

    Args:
        path: the adapter file.
        model: a pipeline class, a folder, or a Python file with ``build()`` and ``call(pipe)``.
    """
    target = find_target(model)
    call = target.call
    run = (lambda: call(target.pipe)) if call is not None else None
    return [str(check) for check in check_map(target.pipe, load_hook_map(path), run) if not check.passed]


def _exact(pipe: Any, hook_map: HookMap, run: Callable[[], Any]) -> list[Check]:
    """Hooked at all four seams with nothing on, and after undo: not one bit differs anywhere."""
    import chitu_hooks
    from chitu_diffusion.evaluation.parity import compare, make_probe, record

    with chitu_hooks.patch(pipe, hook_map=hook_map) as handle:
        sites = handle.sites
    reference = record(sites, run)
    probe = make_probe(sites)
    with chitu_hooks.patch(pipe, [probe], hook_map=hook_map):
        hooked = compare(sites, run, reference)
    undone = compare(sites, run, reference)
    moved, stayed, idle = [r for r in hooked if not r.equal], [r for r in undone if not r.equal], probe.idle(sites)
    return [
        Check(
            "exact", not moved, f"hooked with nothing on, {len(moved)} of {len(hooked)} sites differ" + _first(moved)
        ),
        Check("undone", not stayed, f"after undo, {len(stayed)} of {len(undone)} sites differ" + _first(stayed)),
        Check("seams", not idle, ", ".join(f"{seam} {n} calls" for seam, n in probe.seams().items())),
    ]


def _first(rows: list[Any]) -> str:
    return f", the first is {rows[0].site}" if rows else ""


def _skips(pipe: Any, hook_map: HookMap, run: Callable[[], Any]) -> Check:
    """A static cache that computes the first step only: the trunk can be skipped."""
    import chitu_hooks
    from chitu_diffusion.flexcache import Static, make_strategy

    open_stacks = [stack.path for stack in hook_map.stacks or () if not stack.returns]
    if open_stacks:
        return Check("skips", True, f"not tried: the streams of {', '.join(open_stacks)} are left to inference")
    strategy = make_strategy(Static(steps=(0,)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nothing was skipped is told by the check
        with chitu_hooks.patch(pipe, [strategy], hook_map=hook_map) as handle:
            run()
            report = handle.report()
    skipped = sum(calls["skipped"] for calls in report.branches.values())
    computed = sum(calls["computed"] for calls in report.branches.values())
    detail = f"a static cache computed {computed} calls and skipped {skipped} in {report.steps} steps"
    return Check("skips", skipped > 0 or report.steps == 1, detail)
