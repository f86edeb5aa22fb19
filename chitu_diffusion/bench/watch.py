"""What really ran: FLOPs and blocks of every denoiser call, counted at the leaf modules, whoever decided to skip them.

Our caches skip at the block seam, diffusers' inside a block's forward, cache-dit before the blocks are called at all. A
leaf module (a linear layer, a convolution) that runs is seen in every case, so all are counted in one unit.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from chitu_diffusion.flexcache.fewer import hold_fewer
from chitu_diffusion.flexcache.flops import Prepare, flops_by_module, spec_of
from chitu_diffusion.runtime.metrics import is_last
from chitu_hooks import Call, Feature, Generation, Order, StepCall

FULL, PART, SKIPPED = "full", "part", "skipped"
"""A denoiser call in which every block ran, some did, or none."""


def leaf_flops(
    denoiser: nn.Module, args: Any, kwargs: Any, prepare: Prepare = contextlib.nullcontext
) -> dict[str, float]:
    """Dotted path of each leaf module -> FLOPs that go with one call of it; together they are those of the call.

    What a module does outside its children, such as attention, goes with the first leaf inside it that is run. `prepare`
    changes the copy on which the call is repeated.
    """
    _, counts = flops_by_module(denoiser, args, kwargs, prepare)
    root = type(denoiser).__name__
    totals = {path.removeprefix(root).removeprefix("."): sum(ops.values()) for path, ops in counts.items()}
    totals.pop("Global")
    leaves = {path for path, module in denoiser.named_modules() if not any(module.children())}
    own = {path: float(total) for path, total in totals.items()}
    for path, total in totals.items():
        if path:
            own[_parent(path, totals)] -= total
    found = {path: own[path] for path in totals if path in leaves}
    for path, flops in own.items():
        if path not in leaves and flops:
            first = next(leaf for leaf in found if not path or leaf.startswith(f"{path}."))
            found[first] += flops
    return found


def _parent(path: str, known: dict[str, Any]) -> str:
    """The nearest module above `path` that the counter lists; the model itself is the empty path."""
    while path:
        path = path.rpartition(".")[0]
        if path in known:
            return path
    return ""


class Watcher(Feature):
    """Looks on at one generation: what ran, and the last latents.

    Attributes:
        flops: of all denoiser calls, for all pictures of the batch.
        calls: ``denoiser/branch`` -> full, part or skipped -> number of calls.
        latents: what the last ``scheduler.step`` returned.
    """

    name = "bench"
    exactness = "exact"
    order = Order.CLOCK

    def __init__(self, on_step: Callable[[], None] = lambda: None) -> None:
        self.on_step = on_step
        self.flops = 0.0
        self.calls: dict[str, Counter[str]] = {}
        self.latents: torch.Tensor | None = None
        self.problem: str | None = None
        """Why FLOPs are not known."""
        self._ran: Counter[str] = Counter()
        self._leaves: dict[str, dict[str, float]] = {}

    @contextlib.contextmanager
    def at(self, denoisers: list[Any]) -> Iterator[Watcher]:
        """Stand at every leaf module of `denoisers`, which are sites of a handle."""
        with contextlib.ExitStack() as hooks:
            for site in denoisers:
                for path, module in site.inner.named_modules():
                    if not any(module.children()):
                        self._stand_at(module, path, hooks)
            yield self

    def _stand_at(self, module: nn.Module, path: str, hooks: contextlib.ExitStack) -> None:
        """Count each run of a leaf; diffusers' hooks may leave it out inside its call, so there it is counted further in."""
        registry = getattr(module, "_diffusers_hook", None)
        innermost = registry._fn_refs[0] if registry is not None and registry._fn_refs else None
        if innermost is None:
            hooks.callback(module.register_forward_pre_hook(self._passing(path)).remove)
            return
        name = "forward" if innermost.original_forward is None else "original_forward"
        original, passing = getattr(innermost, name), self._passing(path)

        def forward(*args: Any, **kwargs: Any) -> Any:
            passing(module, args)
            return original(*args, **kwargs)

        setattr(innermost, name, forward)
        hooks.callback(setattr, innermost, name, original)

    def _passing(self, path: str) -> Callable[..., None]:
        def passing(module: nn.Module, args: Any) -> None:
            self._ran[path] += 1

        return passing

    def begin(self, generation: Generation) -> None:
        self.flops, self.calls, self.latents = 0.0, {}, None

    def denoiser_in(self, call: Call) -> None:
        self._ran.clear()
        call.branch.memory(self).specs = (spec_of(call.args), spec_of(call.kwargs))

    def denoiser_out(self, call: Call) -> None:
        leaves = self._of(call, self._tokens(call))
        self.flops += sum(leaves.get(path, 0.0) * count for path, count in self._ran.items())
        blocks = [f"{block.path}." for stack in call.denoiser.stacks for block in stack.blocks]
        ran = sum(any(path.startswith(block) for path in self._ran) for block in blocks)
        kind = FULL if ran == len(blocks) else PART if ran else SKIPPED
        self.calls.setdefault(f"{call.denoiser.name}/{call.branch.name}", Counter())[kind] += 1

    def step_out(self, step: StepCall) -> None:
        self.on_step()
        if is_last(step):
            self.latents = step.next_sample

    def end(self, generation: Generation) -> None:
        # Attention that was recalled in the attention seam: the layers around it ran, and it went with the first of them; and
        # what attention on kept keys cost on top.
        self.flops -= generation.saved_flops

    def _tokens(self, call: Call) -> int | None:
        """How many image tokens this call computed, where a cache left out some of them: its leaves ran on those."""
        key, seen = (call.denoiser.name, call.branch.name), call.generation.memory(self)
        counts: Counter[int] = Counter(call.generation.fewer.get(key))
        # Not the branch's own memory: a branch that is new midway has the name of the one before it.
        before: dict[Any, Counter[int]] = vars(seen).setdefault("fewer", {})
        new = counts - before.get(key, Counter())
        before[key] = counts
        return next(iter(new), None)

    def _of(self, call: Call, tokens: int | None) -> dict[str, float]:
        """FLOPs by leaf, for the shapes of this call."""
        args, kwargs = call.branch.memory(self).specs
        key = repr((call.denoiser.name, args, kwargs, tokens))

        def prepare(copy: nn.Module) -> contextlib.AbstractContextManager[Any]:
            return contextlib.nullcontext() if tokens is None else hold_fewer(copy, call.denoiser, tokens)

        if key not in self._leaves:
            try:
                self._leaves[key] = leaf_flops(call.denoiser.inner, args, kwargs, prepare)
            except (RuntimeError, NotImplementedError, AttributeError, TypeError, KeyError) as error:
                lines = str(error).splitlines() or [""]
                self.problem = f"{type(call.denoiser.inner).__name__} does not run on the meta device: {lines[0][:120]}"
                self._leaves[key] = {}
        return self._leaves[key]
