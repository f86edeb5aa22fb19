"""Two runs of one pipeline, compared at every site: what went out of each denoiser, stack, block and attention layer.

Outputs are taken by torch's own forward hooks, which know nothing of Chitu and fire inside its hooks. A block that is
skipped does not run, so it has no output to compare; the number of calls tells.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from chitu_hooks import AttentionContext, BlockInputs, Call, Feature, Generation, Order, Sites, StepCall, Streams
from chitu_hooks.feature import SEAM_METHODS, overrides
from chitu_hooks.sites import BlockSite

OUTPUT = "output"
"""The row of what ``pipe(...)`` returned."""


@dataclass
class Row:
    """One site, over a whole run."""

    kind: str
    """`denoiser`, `stack` (its exit), `block`, `attention` or `output`."""
    site: str
    """Dotted name."""
    calls: int = 0
    reference_calls: int = 0
    largest: float = 0.0
    """Largest absolute difference of any value; infinite where shapes differ or only one is a number."""

    @property
    def equal(self) -> bool:
        return self.largest == 0.0 and self.calls == self.reference_calls


@dataclass
class Recording:
    """Every output of one run, on the CPU, by site."""

    outputs: dict[str, list[list[torch.Tensor]]] = field(default_factory=dict)
    result: list[torch.Tensor] = field(default_factory=list)


def named_modules(sites: Sites) -> dict[str, tuple[str, torch.nn.Module]]:
    """Dotted name -> kind and module, of everything that is called at the sites."""
    found: dict[str, tuple[str, torch.nn.Module]] = {}
    for denoiser in sites.denoisers:
        found[denoiser.name] = ("denoiser", denoiser.inner)
        for stack in denoiser.stacks:
            for block in stack.blocks:
                found[f"{denoiser.name}.{block.path}"] = ("block", block.module)
        for site in denoiser.attention:
            found[f"{denoiser.name}.{site.path}"] = ("attention", site.module)
    return found


def record(sites: Sites, run: Callable[[], Any]) -> Recording:
    """Run once and keep every output."""
    recording = Recording()

    def keep(name: str, tensors: list[torch.Tensor]) -> None:
        recording.outputs.setdefault(name, []).append([tensor.detach().to("cpu", copy=True) for tensor in tensors])

    with _watched(sites, keep):
        recording.result = [tensor.detach().to("cpu", copy=True) for tensor in tensors_of(run())]
    return recording


def compare(sites: Sites, run: Callable[[], Any], reference: Recording) -> list[Row]:
    """Run once and compare every output with that of `reference` as it comes.

    Returns:
        A row for each site that was called in either run, in the order of the sites, the final output last.
    """
    rows = {name: Row(kind, name) for name, (kind, _) in named_modules(sites).items()}
    for name, row in rows.items():
        row.reference_calls = len(reference.outputs.get(name, []))

    def check(name: str, tensors: list[torch.Tensor]) -> None:
        row = rows[name]
        if row.calls < row.reference_calls:
            row.largest = max(row.largest, largest_difference(tensors, reference.outputs[name][row.calls]))
        row.calls += 1

    with _watched(sites, check):
        result = tensors_of(run())
    output = Row("output", OUTPUT, 1, 1, largest_difference(result, reference.result))
    return [*_with_stacks(sites, rows), output]


def _with_stacks(sites: Sites, rows: dict[str, Row]) -> Iterator[Row]:
    """`rows` that were called, each stack's exit before its blocks."""
    exits = {}
    for denoiser in sites.denoisers:
        for stack in denoiser.stacks:
            first, last = (rows[f"{denoiser.name}.{stack.blocks[i].path}"] for i in (0, -1))
            name = f"{denoiser.name}.{stack.path}"
            exits[first.site] = Row("stack", name, last.calls, last.reference_calls, last.largest)
    for name, row in rows.items():
        if name in exits:
            yield exits[name]
        if row.calls or row.reference_calls:
            yield row


@contextlib.contextmanager
def _watched(sites: Sites, see: Callable[[str, list[torch.Tensor]], None]) -> Iterator[None]:
    with contextlib.ExitStack() as hooks:
        for name, (_, module) in named_modules(sites).items():

            def hook(module: Any, args: Any, output: Any, name: str = name) -> None:
                see(name, tensors_of(output))

            hooks.callback(module.register_forward_hook(hook).remove)
        yield


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Every tensor and array in an output, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in tensors_of(item)]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_of(item)]
    if hasattr(value, "__array__"):
        return [torch.as_tensor(value.__array__())]
    return []


def largest_difference(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """Largest absolute difference, value by value; NaN equals NaN."""
    if len(one) != len(other):
        return float("inf")
    largest = 0.0
    for a, b in zip(one, other):
        if a.shape != b.shape or a.dtype != b.dtype:
            return float("inf")
        b = b.to(a.device)
        if torch.equal(a, b):
            continue
        difference = (a.double() - b.double()).abs()
        both = (a == b) | (a.isnan() & b.isnan())
        difference = difference.masked_fill(both, 0.0).nan_to_num(nan=float("inf"))
        largest = max(largest, difference.max().item())
    return largest


class Probe(Feature):
    """Overrides every method that a plain run reaches, and changes nothing: all four seams are really installed, and counted."""

    name = "probe"
    exactness = "exact"
    order = Order.CLOCK

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        """Method -> number of calls."""

    def begin(self, generation: Generation) -> None:
        self.calls["begin"] += 1

    def step_in(self, step: StepCall) -> None:
        self.calls["step_in"] += 1

    def step_out(self, step: StepCall) -> None:
        self.calls["step_out"] += 1

    def denoiser_in(self, call: Call) -> None:
        self.calls["denoiser_in"] += 1

    def denoiser_out(self, call: Call) -> None:
        self.calls["denoiser_out"] += 1

    def trunk_in(self, call: Call, streams: Streams) -> Streams | None:
        self.calls["trunk_in"] += 1
        return None

    def trunk_out(self, call: Call, streams: Streams) -> Streams | None:
        self.calls["trunk_out"] += 1
        return None

    def block_in(self, call: Call, block: BlockSite, inputs: BlockInputs) -> Streams | None:
        self.calls["block_in"] += 1
        return None

    def block_out(self, call: Call, block: BlockSite, outputs: Streams) -> Streams | None:
        self.calls["block_out"] += 1
        return None

    def attention(self, q_BSHD: Any, k_BTHD: Any, v_BTHD: Any, ctx: AttentionContext) -> None:
        self.calls["attention"] += 1

    def end(self, generation: Generation) -> None:
        self.calls["end"] += 1

    def seams(self) -> dict[str, int]:
        """Seam -> calls of the method of it that was called most."""
        return {seam: max(self.calls[method] for method in methods) for seam, methods in SEAM_METHODS.items()}

    def idle(self, sites: Sites) -> list[str]:
        """The seams that the pipeline has and of which some method that this probe overrides was never called."""
        expected = {"clock", "denoiser"}
        if sites.blocks and not isinstance(self, ProbeWithoutTrunk):
            expected.add("block")
        if any(site.reachable for site in sites.attention):
            expected.add("attention")
        return sorted(seam for seam in expected if not all(self.calls[method] for method in self._own(seam)))

    def _own(self, seam: str) -> list[str]:
        return [method for method in SEAM_METHODS[seam] if overrides(self, method)]


class ProbeWithoutTrunk(Probe):
    """For denoisers that have no stack of blocks, such as UNets: the block seam is left alone."""

    trunk_in, trunk_out = Feature.trunk_in, Feature.trunk_out
    block_in, block_out = Feature.block_in, Feature.block_out


def make_probe(sites: Sites) -> Probe:
    """A probe of every seam that the pipeline has."""
    return Probe() if all(denoiser.stacks for denoiser in sites.denoisers) else ProbeWithoutTrunk()
