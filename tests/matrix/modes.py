"""What is tried on every row, and what comes out: one cell a mode."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from snapshot import changes, snapshot
from torch import nn
from torch.nn.attention import flex_attention
from torch.overrides import TorchFunctionMode

from chitu_diffusion import Feature, Static, patch
from chitu_diffusion.evaluation.parity import make_probe
from chitu_hooks import ChituError

from .table import Model

STEPS = 4
EVERY = range(64)
HALF = range(0, 64, 2)


@dataclass(frozen=True)
class Cell:
    """The outcome of one mode on one row.

    Attributes:
        state: *works*, *refused*, *scoped out*; *fails* is what no published row may have.
        note: the reason, or what a working mode leaves out.
    """

    state: str
    note: str = ""

    def __str__(self) -> str:
        return f"{self.state}: {self.note}" if self.note else self.state


WORKS = Cell("works")
ROUNDING = 1e-5
EAGER_FLEX = mock.patch.object(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


class Trial:
    """One row, built, and run once without any hook."""

    def __init__(self, row: Model, steps: int = STEPS) -> None:
        self.row, self.steps = row, steps
        self.pipe = row.build()
        self.stock = self.run()
        before = snapshot(self.pipe, ran=True)
        self.run()
        self.restless = set(changes(before, snapshot(self.pipe, ran=True)))
        """What an unhooked run changes by itself: tables that the model makes anew."""

    def run(self) -> torch.Tensor:
        # Flex attention is compiled unless told otherwise, and the CPU build of torch cannot compile it everywhere.
        with EAGER_FLEX, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.row.run(self.pipe, self.steps)

    def equal(self) -> bool:
        return torch.equal(self.run(), self.stock)


def exact(trial: Trial) -> Cell:
    """All four seams hooked and nothing on: no bit differs, and afterwards every object is as it was."""
    before = snapshot(trial.pipe, ran=True)
    with patch(trial.pipe) as handle:
        sites = handle.sites
    probe = make_probe(sites)
    with patch(trial.pipe, features=(probe,)):
        same = trial.equal()
    idle = probe.idle(sites)
    if not same or idle:
        return Cell("fails", "another output" if not same else f"seams never reached: {', '.join(idle)}")
    return left_behind(trial, before) or WORKS


def left_behind(trial: Trial, before: dict[str, Any]) -> Cell | None:
    """What is not as it was `before`, now that the hooks are off."""
    left = sorted(set(changes(before, snapshot(trial.pipe, ran=True))) - trial.restless)
    if left or not trial.equal():
        return Cell("fails", f"after undo: {', '.join(left[:3]) or 'another output'}")
    return None


def attention(trial: Trial) -> Cell:
    """Every attention call passes through the seam, or its layer is reported as out of reach."""
    counter = AttentionCount()
    with patch(trial.pipe, features=(counter,)) as handle:
        with everything_counted([denoiser.inner for denoiser in handle.sites.denoisers]) as total:
            trial.run()
        unreachable = handle.report().unreachable
    missed = {path: calls - counter.seen[path] for path, calls in total.items() if calls > counter.seen[path]}
    unnamed = [path for path in missed if not any(path == u or path.startswith(f"{u}.") for u in unreachable)]
    if unnamed:
        return Cell("fails", f"not seen and not reported: {', '.join(unnamed[:3])}")
    seen = sum(counter.seen.values())
    if not seen:
        return Cell("fails", "no attention call was seen")
    return Cell("works", f"out of reach: {', '.join(folded(unreachable))}") if unreachable else WORKS


def full_budget(trial: Trial) -> Cell:
    """A cache that has to compute every step gives the unhooked bits."""
    with patch(trial.pipe, cache=Static(steps=EVERY)):
        same = trial.equal()
    return WORKS if same else Cell("fails", "another output")


def cache(trial: Trial) -> Cell:
    """`static` at half of the steps: every skip that is due happens, and it shows in the output."""
    with patch(trial.pipe, cache=Static(steps=HALF)) as handle:
        out = trial.run()
        report = handle.report()
    return skipped(trial, "static", out, report)


def skipped(trial: Trial, name: str, out: torch.Tensor, report: Any) -> Cell:
    """What came of the skips of the cache `name` that were due."""
    books = next(feature for feature in report.features if feature["name"] == name)
    due = [note for note in report.notes if "although a skip was due" in note]
    if not books["hits"]:
        return Cell("fails", f"none of {books['due']} skips: {'; '.join(report.notes) or 'no reason given'}")
    if trial.row.branches not in (None, len(report.branches)):
        return Cell("fails", f"{trial.row.branches} branches run, {len(report.branches)} told apart")
    if not out.isfinite().all() or torch.equal(out, trial.stock):
        return Cell("fails", "skipping did not show in the output" if out.isfinite().all() else "output is not finite")
    aside = [note.split(": streams not known")[0] for note in report.notes if "streams not known" in note]
    left = [f"always run: {', '.join(folded(aside))}"] if aside else []
    if books["hits"] < books["due"]:
        why = due[0].split("was due: ")[1] if due else "a branch of guidance began at such a step"
        left.append(f"{books['hits']} of {books['due']} skips that were due: {why}")
    return Cell("works", "; ".join(left))


def replay(trial: Trial) -> Cell:
    """The same denoiser call, computed and then skipped, gives the same output but for rounding."""
    calls: dict[int, tuple[Any, Any]] = {}
    skip = SkipWhenTold()
    with patch(trial.pipe, features=(skip,)) as handle:
        modules = [denoiser.module for denoiser in handle.sites.denoisers]
        with _last_calls(modules, calls):
            trial.run()
        with EAGER_FLEX, torch.no_grad(), handle._engine.generate(trial.pipe) as generation:
            for place, (args, kwargs) in calls.items():
                skip.told = False
                computed = _first(modules[place](*args, **kwargs))
                skip.told = True
                generation.ordinals.clear()  # as if a step lay between them
                skipped = _first(modules[place](*args, **kwargs))
                error = (skipped - computed).abs().max() / computed.abs().max()
                if not error <= ROUNDING:
                    return Cell(
                        "fails", f"{handle.sites.denoisers[place].name}: off by {error:.0e} of the largest value"
                    )
    return WORKS


def flops(trial: Trial) -> Cell:
    """The books of a cache count FLOPs, total and saved."""
    with patch(trial.pipe, cache=Static(steps=HALF)) as handle:
        trial.run()
        books = next(feature for feature in handle.report().features if feature["name"] == "static")["flops"]
    if "not counted" in books:
        return Cell("refused", books["not counted"])
    if not 0 < books["saved"] < books["full"]:
        return Cell("fails", f"{books['saved']} of {books['full']} saved")
    return WORKS


MODES: dict[str, Callable[[Trial], Cell]] = {
    "hooked and undone": exact,
    "attention": attention,
    "full budget": full_budget,
    "static cache": cache,
    "replay": replay,
    "FLOPs": flops,
}
"""Column -> what is tried. A further mode is one more entry."""


def outcome(mode: str, trial: Trial) -> Cell:
    """The cell of `mode`; what Chitu refuses is told in its own words."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return MODES[mode](trial)
        except ChituError as error:
            return Cell("refused", str(error))


# -- helpers of `replay` -----------------------------------------------------------------------------------------------


class SkipWhenTold(Feature):
    """Skips the trunk in every call while `told` is set."""

    name = "skip when told"
    skips_trunk = True
    told = False

    def denoiser_in(self, call: Any) -> None:
        if self.told:
            call.skip_trunk()


@contextmanager
def _last_calls(modules: list[nn.Module], calls: dict[int, tuple[Any, Any]]) -> Iterator[None]:
    """Keep the arguments of each module's last call, by its place in `modules`."""

    def keep(place: int) -> Callable[..., None]:
        return lambda module, args, kwargs: calls.update({place: (args, kwargs)})

    hooks = [module.register_forward_pre_hook(keep(i), with_kwargs=True) for i, module in enumerate(modules)]
    yield
    for hook in hooks:
        hook.remove()


def _first(output: Any) -> torch.Tensor:
    while not isinstance(output, torch.Tensor):
        output = output[0]
    return output


# -- counting attention without the seam -------------------------------------------------------------------------------


class AttentionCount(Feature):
    """Counts the calls that the seam sees, by the dotted name of the module."""

    name = "count"

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()

    def attention(self, q_BSHD: Any, k_BTHD: Any, v_BTHD: Any, ctx: Any) -> None:
        self.seen[ctx.site.path] += 1


@contextmanager
def everything_counted(roots: list[nn.Module]) -> Iterator[Counter[str]]:
    """Count every attention call of torch inside `roots`, by the innermost module that is running."""
    counts: Counter[str] = Counter()
    running: list[str] = []

    def enter(path: str) -> Callable[..., None]:
        return lambda module, args: running.append(path)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        running.pop()

    class Calls(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if running and getattr(function, "__name__", "") == "scaled_dot_product_attention":
                counts[running[-1]] += 1
            return function(*args, **(kwargs or {}))

    def flex(*args: Any, **kwargs: Any) -> Any:
        counts[running[-1]] += 1
        return original(*args, **kwargs)

    original = flex_attention.flex_attention
    modules = [found for root in roots for found in root.named_modules()]
    hooks = [hook for path, module in modules for hook in _hooks(module, enter(path), leave)]
    try:
        with Calls(), mock.patch.object(flex_attention, "flex_attention", flex):
            yield counts
    finally:
        for hook in hooks:
            hook.remove()


def _hooks(module: nn.Module, enter: Any, leave: Any) -> tuple[Any, Any]:
    return module.register_forward_pre_hook(enter), module.register_forward_hook(leave)


def folded(paths: list[str]) -> list[str]:
    """`paths` with block numbers replaced by ``*``, each once."""
    return list(dict.fromkeys(".".join("*" if part.isdigit() else part for part in path.split(".")) for path in paths))
