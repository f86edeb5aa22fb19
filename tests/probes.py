"""Features that tests attach: one that only watches, the smallest step cache, one attention kernel, one that fails."""

from __future__ import annotations

import gc
import types
from collections import Counter
from typing import Any

import torch

from chitu_hooks import Feature, Handle, Order, Refusal


class Watch(Feature):
    """Overrides every method, counts, changes nothing."""

    name = "watch"
    order = Order.CLOCK

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.positions: list[int] = []
        """Step position of every denoiser call."""
        self.steps: list[tuple[int, int, int | None]] = []
        """Position, stage and number of steps at every ``scheduler.step``."""
        self.branches: list[str] = []
        """Branch name of every denoiser call."""

    def bind(self, sites: Any, hook_map: Any) -> Refusal | None:
        self.counts["bind"] += 1
        return None

    def begin(self, generation: Any) -> None:
        self.counts["begin"] += 1

    def step_in(self, step: Any) -> None:
        self.counts["step_in"] += 1
        self.steps.append((step.step.position, step.step.stage, step.generation.num_steps))

    def step_out(self, step: Any) -> None:
        self.counts["step_out"] += 1

    def denoiser_in(self, call: Any) -> Any:
        self.counts["denoiser_in"] += 1
        self.positions.append(call.step.position)
        self.branches.append(call.branch.name)

    def denoiser_out(self, call: Any) -> None:
        self.counts["denoiser_out"] += 1

    def trunk_in(self, call: Any, streams: Any) -> Any:
        self.counts["trunk_in"] += 1

    def trunk_out(self, call: Any, streams: Any) -> Any:
        self.counts["trunk_out"] += 1

    def block_in(self, call: Any, block: Any, inputs: Any) -> Any:
        self.counts["block_in"] += 1

    def block_out(self, call: Any, block: Any, outputs: Any) -> Any:
        self.counts["block_out"] += 1

    def attention(self, q_BSHD: torch.Tensor, k_BTHD: torch.Tensor, v_BTHD: torch.Tensor, ctx: Any) -> Any:
        self.counts["attention"] += 1

    def end(self, generation: Any) -> None:
        self.counts["end"] += 1

    def report(self) -> dict[str, Any]:
        return {"calls": self.counts["denoiser_in"]}


class Keep(Feature):
    """A step cache: computes at the positions in `steps`, and skips the trunk at the others where that is possible."""

    name = "keep"
    exactness = "lossy"
    skips_trunk = True

    def __init__(self, *steps: int) -> None:
        self.steps = frozenset(steps)
        self.log: list[tuple[str, int, int, bool]] = []
        """Branch, position, stage of every denoiser call, and whether it was skipped."""

    def denoiser_in(self, call: Any) -> Any:
        if call.step.position not in self.steps and call.can_skip:
            call.skip_trunk()
        self.log.append((call.branch.name, call.step.position, call.step.stage, call.skipping))

    @property
    def skips(self) -> list[bool]:
        return [skipped for *_, skipped in self.log]


def every(steps: int = 64) -> Keep:
    """A step cache with full budget: it never skips."""
    return Keep(*range(steps))


class Scale(Feature):
    """An attention feature whose action shows: the original call, times `factor`."""

    name = "scale"
    exactness = "lossy"
    order = Order.KERNEL

    def __init__(self, factor: float = 0.5) -> None:
        self.factor = factor

    def attention(self, q_BSHD: torch.Tensor, k_BTHD: torch.Tensor, v_BTHD: torch.Tensor, ctx: Any) -> Any:
        return ctx.next(q_BSHD, k_BTHD, v_BTHD) * self.factor


class Formula(Feature):
    """Attention written out: softmax(q k' scale + mask) v. The same mathematics as any kernel."""

    name = "formula"
    exactness = "close"
    order = Order.KERNEL

    def attention(self, q_BSHD: torch.Tensor, k_BTHD: torch.Tensor, v_BTHD: torch.Tensor, ctx: Any) -> Any:
        q, k, v = (tensor.transpose(1, 2) for tensor in (q_BSHD, k_BTHD, v_BTHD))
        if k.shape[1] != q.shape[1]:
            k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], dim=1) for tensor in (k, v))
        scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if ctx.scale is None else ctx.scale)
        if ctx.mask is not None:
            mask = ctx.mask
            scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        # A query that may see no key at all gets zero, as from torch.
        return (scores.softmax(-1).nan_to_num() @ v).transpose(1, 2)


class Fails(Feature):
    """Raises in `method`."""

    name = "fails"

    def __init__(self, method: str) -> None:
        def fail(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError(f"{method} fails")

        setattr(self, method, fail)


class SdpaCounter:
    """Counts calls of torch's own attention, whoever makes them; independent of the engine."""

    def __enter__(self) -> SdpaCounter:
        from torch.overrides import TorchFunctionMode

        counter = self
        counter.calls = 0

        class Mode(TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                counter.calls += func is torch.nn.functional.scaled_dot_product_attention
                return func(*args, **(kwargs or {}))

        self._mode = Mode()
        self._mode.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._mode.__exit__(*exception)


def reachable_tensors(handle: Handle) -> list[torch.Tensor]:
    """Every tensor that the handle's own state leads to: not those of the pipeline, its modules and its sites."""
    engine = handle._engine
    stop = (torch.nn.Module, type, types.ModuleType, types.FunctionType, types.FrameType, types.CodeType)
    seen = {id(handle.pipe), id(handle.sites), id(vars(handle.pipe))}
    found, queue = [], [engine, *engine.features]
    while queue:
        item = queue.pop()
        if id(item) in seen or isinstance(item, stop):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            found.append(item)
            continue
        queue += [other for other in gc.get_referents(item) if not type(other).__name__.endswith("Site")]
    return found


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Largest difference, relative to the largest value of `other`."""
    return float((one.float() - other.float()).abs().max() / other.float().abs().max())
