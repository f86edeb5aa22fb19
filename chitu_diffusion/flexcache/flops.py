"""FLOPs of denoiser calls: counted once per shape on a meta copy with stock processors, by torch's own counter.

The counter does not see into compiled graphs or opaque kernels, so the call is repeated on the meta device, where it
costs no arithmetic: multiplications and additions of matrix products, convolutions and attention, 2 per multiply-add.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from chitu_hooks import Call, Generation
from chitu_hooks.call import map_tensors
from chitu_hooks.spans import Spans


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor, without the tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class FlopCount:
    """FLOPs of one denoiser call."""

    total: int
    blocks: dict[tuple[str, int], int]
    """Of these, by path of the stack and index of the block."""

    @property
    def trunk(self) -> int:
        """FLOPs of all blocks."""
        return sum(self.blocks.values())

    def inside(self, spans: dict[str, range]) -> int:
        """FLOPs of the blocks in `spans`, by path of the stack: what skipping them saves."""
        return sum(flops for (path, index), flops in self.blocks.items() if index in spans.get(path, ()))


def spec_of(value: Any) -> Any:
    """`value` with every tensor replaced by its `TensorSpec`."""
    return map_tensors(value, lambda tensor: TensorSpec(tuple(tensor.shape), tensor.dtype))


def _meta(value: Any) -> Any:
    if isinstance(value, TensorSpec):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    if isinstance(value, (list, tuple)):
        return type(value)(_meta(item) for item in value)
    if isinstance(value, dict):
        return {key: _meta(item) for key, item in value.items()}
    return value


def flops_by_module(denoiser: Any, args: Any, kwargs: Any) -> tuple[Any, dict[str, dict[Any, int]]]:
    """The meta copy of `denoiser` on which one call was repeated, and what torch's counter found there.

    Returns:
        The copy; and class name and dotted path of each module -> operation -> FLOPs, ``Global`` for all of them.
    """
    dtype = next((p.dtype for p in denoiser.parameters() if p.is_floating_point()), torch.float32)
    with torch.device("meta"), torch.no_grad():
        copy = type(denoiser).from_config(denoiser.config)
        torch.nn.Module.to(copy, dtype).eval()  # not ModelMixin.to, which warns of modules kept in float32
        counter = FlopCounterMode(display=False)
        with counter:
            copy(*_meta(spec_of(args)), **_meta(spec_of(kwargs)))
    return copy, counter.get_flop_counts()


def count_flops(denoiser: Any, args: Any, kwargs: Any, stacks: tuple[str, ...] = ()) -> FlopCount:
    """FLOPs of ``denoiser(*args, **kwargs)``.

    Args:
        denoiser: a diffusers model; a stock one is built from its config on the meta device.
        args, kwargs: of the call, with tensors or `TensorSpec`s.
        stacks: dotted paths of the stacks.

    Raises:
        NotImplementedError, RuntimeError: the model cannot run on the meta device.
    """
    _, counts = flops_by_module(denoiser, args, kwargs)
    root = type(denoiser).__name__
    blocks = {}
    for path, operations in counts.items():
        stack, _, index = path.removeprefix(f"{root}.").rpartition(".")
        if stack in stacks:
            blocks[stack, int(index)] = int(sum(operations.values()))
    return FlopCount(int(sum(counts["Global"].values())), blocks)


class Ledger:
    """The books of one feature over one generation: what was due, what was skipped, and what that saved."""

    def __init__(self) -> None:
        self._counts: dict[str, FlopCount | str] = {}
        """Shapes of a call -> its FLOPs, or why they could not be counted."""
        self.begin()

    def begin(self) -> None:
        self.wanted = 0
        self.skipped = 0
        self.computed = 0
        self.reused = 0
        """Calls that were computed, but for parts that were reused."""
        self._saved_inside = 0
        self.bytes_held = 0
        self.seconds = 0.0
        self._begun = time.perf_counter()
        self._calls: dict[tuple[str, str], tuple[Any, Any, Any, tuple[str, ...]]] = {}
        self._spans: dict[tuple[str, str], Spans] = {}
        self._tally: dict[tuple[str, str], dict[str, int]] = {}

    def see(self, call: Call) -> None:
        """Remember the shapes of a branch's first call, and which blocks of it can be skipped."""
        key = (call.denoiser.name, call.branch.name)
        self._spans[key] = call.spans
        if key not in self._calls:
            stacks = tuple(stack.path for stack in call.denoiser.stacks)
            self._calls[key] = (call.denoiser.inner, spec_of(call.args), spec_of(call.kwargs), stacks)

    def close(self, generation: Generation) -> None:
        """The generation is over; on a GPU this waits for it once, so that the seconds are those of the work."""
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.seconds = time.perf_counter() - self._begun
        self.bytes_held = generation.peak_bytes
        self._tally = {key: dict(calls) for key, calls in generation.tally.items()}
        self._saved_inside = generation.saved_flops
        self.skipped = self.reused + sum(calls["skipped"] + calls["replaced"] for calls in self._tally.values())
        self.computed = sum(calls["computed"] for calls in self._tally.values()) - self.reused

    @property
    def flops(self) -> dict[str, Any]:
        """Total, spent and saved FLOPs of the generation, or the reason why they could not be counted."""
        total, saved = 0, self._saved_inside
        for key, calls in self._tally.items():
            if key not in self._calls:
                continue
            count = self._count(key)
            if isinstance(count, str):
                return {"not counted": count}
            paths = self._calls[key][3]
            spans = {paths[number]: span for number, span in self._spans[key].ranges.items()}
            total += count.total * sum(calls.values())
            saved += count.inside(spans) * calls["skipped"] + count.total * calls["replaced"]
        return {"full": total, "spent": total - saved, "saved": saved}

    def _count(self, key: tuple[str, str]) -> FlopCount | str:
        denoiser, args, kwargs, stacks = self._calls[key]
        shapes = repr((key[0], args, kwargs))
        if shapes not in self._counts:
            try:
                self._counts[shapes] = count_flops(denoiser, args, kwargs, stacks)
            except (RuntimeError, NotImplementedError, AttributeError, TypeError) as error:
                reason = str(error).splitlines()[0][:120]
                self._counts[shapes] = f"{type(denoiser).__name__} does not run on the meta device: {reason}"
        return self._counts[shapes]

    def report(self) -> dict[str, Any]:
        return {
            "computed": self.computed,
            "hits": self.skipped,
            "due": self.wanted,
            "flops": self.flops if self._tally else {},
            "seconds": round(self.seconds, 4),
            "bytes_held": self.bytes_held,
        }
