"""FLOPs of denoiser calls: counted once per shape on a copy without data and with stock processors, by torch's own counter.

The counter does not see into compiled graphs or opaque kernels, so the call is repeated on the meta device, where it costs
no arithmetic: multiplications and additions of matrix products, convolutions and attention, 2 per multiply-add.

Meta tensors have a shape but no numbers, and some models look at numbers: which tokens a mask keeps, how long a text is,
whether there is a picture. Those run a second time, on torch's fake tensors, which is slower: there the call's smaller
arguments keep their values until they come into touch with a weight.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from chitu_hooks import Call, Generation
from chitu_hooks.call import map_tensors
from chitu_hooks.sites import DenoiserSite
from chitu_hooks.spans import Spans

from .fewer import hold_fewer

Prepare = Callable[[torch.nn.Module], AbstractContextManager[Any]]

KEPT = 2**20
"""Most elements of an argument that keeps its values."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor, without the tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class TensorBytes(TensorSpec):
    """A small tensor with its numbers, and still no tensor: nothing of the pipeline is held once the generation is over."""

    data: bytes

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorBytes:
        flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.detach().flatten())
        return cls(tuple(tensor.shape), tensor.dtype, flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")

    def tensor(self) -> torch.Tensor:
        if not self.data:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(bytearray(self.data), dtype=self.dtype).reshape(self.shape)


@dataclass(frozen=True)
class FlopCount:
    """FLOPs of one denoiser call."""

    total: int
    blocks: dict[tuple[str, int], int]
    """Of these, by path of the stack and index of the block."""
    modules: dict[str, int] = field(default_factory=dict)
    """Of these, by path of the module."""

    @property
    def trunk(self) -> int:
        """FLOPs of all blocks."""
        return sum(self.blocks.values())

    def inside(self, spans: dict[str, range]) -> int:
        """FLOPs of the blocks in `spans`, by path of the stack: what skipping them saves."""
        return sum(flops for (path, index), flops in self.blocks.items() if index in spans.get(path, ()))


def spec_of(value: Any) -> Any:
    """`value` with every tensor replaced by its `TensorSpec`."""
    return _mapped(value, lambda tensor: TensorSpec(tuple(tensor.shape), tensor.dtype))


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """`value` with `function` of every tensor and every spec in it."""
    if isinstance(value, (torch.Tensor, TensorSpec)):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(item, function) for item in value)
    if isinstance(value, dict):
        return {key: _mapped(item, function) for key, item in value.items()}
    return value


def _remembered(value: Any) -> Any:
    """`value` with its large tensors replaced by specs."""
    return map_tensors(value, lambda t: t if t.numel() <= KEPT and not t.is_meta else spec_of(t))


def _filled(value: Any, fill: Callable[[TensorSpec], torch.Tensor]) -> Any:
    """`value` with every spec replaced by a tensor without data, unless its numbers are known."""

    def made(item: Any) -> torch.Tensor:
        if isinstance(item, TensorBytes):
            return item.tensor()
        return fill(item) if isinstance(item, TensorSpec) else item.cpu()

    return _mapped(value, made)


class _MasksAsPlaces(TorchDispatchMode):
    """Turns ``activation[mask]`` into the places that the mask keeps, while the mask still has its values."""

    INDEXING = frozenset(
        {torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default}
    )

    supports_higher_order_operators = True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in self.INDEXING:
            places: list[Any] = []
            for index in args[1]:
                is_mask = index is not None and index.dtype == torch.bool
                places += index.nonzero().unbind(1) if is_mask else [index]
            args = (args[0], places, *args[2:])
        return function(*args, **(kwargs or {}))


def _cast(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """What ``model.to(dtype)`` does, which fails on fake parameters."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_floating_point():
                setattr(module, name, torch.nn.Parameter(parameter.to(dtype), requires_grad=False))
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(module, name, buffer.to(dtype))


def count_flops(
    denoiser: Any,
    args: Any,
    kwargs: Any,
    stacks: tuple[str, ...] = (),
    prepare: Prepare = nullcontext,
) -> FlopCount:
    """FLOPs of ``denoiser(*args, **kwargs)``.

    Args:
        denoiser: a diffusers model; a stock one is built from its config, without data.
        args, kwargs: of the call, with tensors or `TensorSpec`s.
        stacks: dotted paths of the stacks.
        prepare: changes the copy, and returns a context to run it in.

    Raises:
        Exception: of any kind, where the model's code needs numbers that are not there.
    """
    copy, counts = flops_by_module(denoiser, args, kwargs, prepare)
    root = type(copy).__name__
    modules = {path.removeprefix(f"{root}."): int(sum(operations.values())) for path, operations in counts.items()}
    blocks = {}
    for path, flops in modules.items():
        stack, _, index = path.rpartition(".")
        if stack in stacks:
            blocks[stack, int(index)] = flops
    return FlopCount(modules.pop("Global"), blocks, modules)


def flops_by_module(
    denoiser: Any, args: Any, kwargs: Any, prepare: Prepare = nullcontext
) -> tuple[Any, dict[str, dict[Any, int]]]:
    """The copy of `denoiser` on which one call was repeated, and what torch's counter found there.

    Returns:
        The copy; and class name and dotted path of each module -> operation -> FLOPs, ``Global`` for all of them.

    Raises:
        Exception: see `count_flops`.
    """
    with torch.no_grad():
        try:
            return _count_on_meta(denoiser, spec_of(args), spec_of(kwargs), prepare)
        except Exception:  # models look at numbers in many ways
            return _count_on_fakes(denoiser, _remembered(args), _remembered(kwargs), prepare)


def _count_on_meta(denoiser: Any, args: Any, kwargs: Any, prepare: Prepare) -> tuple[Any, dict[str, Any]]:

    def fill(spec: TensorSpec) -> torch.Tensor:
        return torch.empty(spec.shape, dtype=spec.dtype, device="meta")

    counter = FlopCounterMode(display=False)
    with torch.device("meta"):
        copy = type(denoiser).from_config(denoiser.config)
        torch.nn.Module.to(copy, _dtype(denoiser)).eval()  # not ModelMixin.to, which warns of modules kept in float32
        with prepare(copy), counter:
            copy(*_filled(args, fill), **_filled(kwargs, fill))
    return copy, counter.get_flop_counts()


def _count_on_fakes(denoiser: Any, args: Any, kwargs: Any, prepare: Prepare) -> tuple[Any, dict[str, Any]]:
    """The same on fake tensors, for models that look at the numbers in their arguments."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fill(spec: TensorSpec) -> torch.Tensor:
        with mode:
            return torch.empty(spec.shape, dtype=spec.dtype)

    counter = FlopCounterMode(display=False)
    with mode:
        copy = type(denoiser).from_config(denoiser.config).eval()
        _cast(copy, _dtype(denoiser))
    # Attention is written out as matrix products, which the counter knows.
    with prepare(copy), counter, _MasksAsPlaces(), sdpa_kernel(SDPBackend.MATH):
        copy(*_filled(args, fill), **_filled(kwargs, fill))
    return copy, counter.get_flop_counts()


def _dtype(model: torch.nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


class Ledger:
    """The books of one feature over one generation: what was due, what was skipped, and what that saved.

    Calls that another rank ran are in none of the numbers: what they saved is in that rank's books.
    """

    def __init__(self) -> None:
        self._counts: dict[str, FlopCount | str] = {}
        """Shapes of a call -> its FLOPs, or why they could not be counted."""
        self._cuts = False
        """Some calls compute fewer tokens, of numbers that are not known before."""
        self.begin()

    def begin(self) -> None:
        self.wanted = 0
        self.skipped = 0
        self.computed = 0
        self.reused = 0
        """Calls that were computed, but for parts that were reused."""
        self._saved_inside = 0
        self.asked = True
        """Whether this rank had calls in which something could be reused."""
        self.bytes_held = 0
        self.seconds = 0.0
        self._begun = time.perf_counter()
        self._calls: dict[tuple[str, str], tuple[Any, Any, Any, tuple[str, ...]]] = {}
        self._sizes: dict[tuple[str, str], set[Any]] = {}
        """Shapes of the sample in a branch's calls."""
        self._fewer: dict[tuple[str, str], Counter[int]] = {}
        self._left_out: dict[tuple[str, str], Counter[str]] = {}
        self._sites: dict[str, DenoiserSite] = {}
        self._spans: dict[tuple[str, str], Spans] = {}
        self._tally: dict[tuple[str, str], dict[str, int]] = {}

    def see(self, call: Call) -> None:
        """Remember the shapes of a branch's first call, and which blocks of it can be skipped."""
        key = (call.denoiser.name, call.branch.name)
        self._spans[key] = call.spans
        self._sites[key[0]] = call.denoiser
        self._sizes.setdefault(key, set()).add(
            getattr(call.argument(next(iter(call.denoiser.arguments), "")), "shape", None)
        )
        if key not in self._calls:
            stacks = tuple(stack.path for stack in call.denoiser.stacks)
            shapes = (spec_of(call.args), spec_of(call.kwargs))
            known = repr((key[0], *shapes)) in self._counts and not self._cuts
            args, kwargs = shapes if known else (_remembered(call.args), _remembered(call.kwargs))
            self._calls[key] = (call.denoiser.inner, args, kwargs, stacks)

    def close(self, generation: Generation) -> None:
        """The generation is over; on a GPU this waits for it once, so that the seconds are those of the work."""
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.seconds = time.perf_counter() - self._begun
        self._calls = {
            key: (denoiser, map_tensors(args, TensorBytes.of), map_tensors(kwargs, TensorBytes.of), stacks)
            for key, (denoiser, args, kwargs, stacks) in self._calls.items()
        }
        self.bytes_held = generation.peak_bytes
        self._tally = {key: dict(calls) for key, calls in generation.tally.items()}
        self._saved_inside = generation.saved_flops
        self.asked = not self._tally or any(
            "elsewhere" not in calls or calls["computed"] + calls["skipped"] + calls["replaced"] > 1
            for calls in self._tally.values()
        )
        self._fewer, self._cuts = generation.fewer, self._cuts or bool(generation.fewer)
        self._left_out = generation.left_out
        self.skipped = self.reused + sum(calls["skipped"] + calls["replaced"] for calls in self._tally.values())
        self.computed = sum(calls["computed"] for calls in self._tally.values()) - self.reused

    @property
    def flops(self) -> dict[str, Any]:
        """Total, spent and saved FLOPs of the generation, or the reason why they could not be counted."""
        total, saved = 0, self._saved_inside
        for key, calls in self._tally.items():
            if key not in self._calls:
                continue
            if len(self._sizes[key]) > 1:
                return {
                    "not counted": f"{' / '.join(key)} had samples of {len(self._sizes[key])} shapes in one generation"
                }
            count = self._count(key)
            if isinstance(count, str):
                return {"not counted": count}
            paths = self._calls[key][3]
            spans = {paths[number]: span for number, span in self._spans[key].ranges.items()}
            total += count.total * (calls["computed"] + calls["skipped"] + calls["replaced"])
            saved += count.inside(spans) * calls["skipped"] + count.total * calls["replaced"]
            for tokens, number in self._fewer.get(key, {}).items():
                part = self._count(key, tokens)
                if isinstance(part, str):
                    return {"not counted": part}
                saved += (count.total - part.total) * number
            saved += sum(count.modules.get(path, 0) * number for path, number in self._left_out.get(key, {}).items())
            denoiser, args, kwargs, stacks = self._calls[key]
            self._calls[key] = (denoiser, spec_of(args), spec_of(kwargs), stacks)  # the numbers are needed once
        return {"full": total, "spent": total - saved, "saved": saved}

    def _count(self, key: tuple[str, str], tokens: int | None = None) -> FlopCount | str:
        denoiser, args, kwargs, stacks = self._calls[key]
        shapes = repr((key[0], spec_of(args), spec_of(kwargs), *(() if tokens is None else (tokens,))))

        def prepare(copy: torch.nn.Module) -> AbstractContextManager[Any]:
            return nullcontext() if tokens is None else hold_fewer(copy, self._sites[key[0]], tokens)

        if shapes not in self._counts:
            try:
                self._counts[shapes] = count_flops(denoiser, args, kwargs, stacks, prepare)
            except Exception as error:  # models look at numbers in many ways; a count must not spoil a report
                reason = next(iter(str(error).splitlines()), type(error).__name__)
                reason = re.sub(r"<(\S+) object at 0x\w+>", r"\1", reason)[:120]
                self._counts[shapes] = f"{type(denoiser).__name__} does not run without data: {reason}"
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
