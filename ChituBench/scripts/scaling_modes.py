"""The rows of `parallel_scaling.py`: which degrees of ours and of diffusers', compiled and recorded how."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import diffusers as D
import torch
from diffusers.hooks.context_parallel import remove_context_parallel


@dataclass
class Mode:
    """One row of the table."""

    parallel: dict[str, Any] = field(default_factory=dict)
    """Arguments of our `Parallel`; empty: no parallelism."""
    native: dict[str, Any] = field(default_factory=dict)
    """Arguments of diffusers' `ContextParallelConfig`."""
    attention: str | None = None
    backend: str | None = None
    """Attention backend set in diffusers."""
    patched: bool = False
    reorder: bool = False
    """Let the compiler move exchanges away from where their results are used."""
    eager: bool = False
    compile_mode: str | None = None
    """`mode` of torch.compile."""
    graphs: bool = False
    """The denoiser's forward recorded as a CUDA graph, see `step_graphs.py`."""

    def compile_arguments(self, backend: str) -> dict[str, Any]:
        """Of each block's `compile`. torch.compile tells graphs apart by its options, and not by its global settings."""
        # diffusers' own hooks break the graph in some models, Wan for one; in the others this changes nothing.
        found: dict[str, Any] = {"fullgraph": not self.native, "dynamic": False, "backend": backend}
        if backend != "inductor":
            return found
        if self.reorder:
            found["options"] = REORDER
        elif self.compile_mode is not None:
            found["mode"] = self.compile_mode
        return found


REORDER = {
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": ["raise_comms", "sink_waits"],
}
"""Inductor starts exchanges as early, and waits for them as late, as the data allow."""


def modes(ranks: int, branches: int, cuda: bool, graphs: bool = False) -> dict[str, Mode]:
    """The rows in the order in which they are run: what the table cannot do without comes first.

    Args:
        graphs: also the rows in which the host launches CUDA graphs.
    """
    auto = "auto" if cuda else None
    ours = {title: Mode(degrees, attention=auto) for title, degrees in _degrees(ranks, branches).items()}
    native = {f"diffusers {title}": Mode(native=degrees) for title, degrees in _native(ranks).items()}
    stock = f"diffusers ulysses {ranks}"
    best = [title for title in ours if title.startswith(("cfg", "gather", "ulysses"))]
    whole = [title for title in best if not title.startswith("cfg")]
    rows = {"one GPU, diffusers": Mode(), "one GPU, ours": Mode(patched=True, attention=auto)}
    rows |= {title: ours[title] for title in best} | {stock: native[stock]}
    rows |= {f"{title}, groups {n}": _in_groups(ours[title], n) for title in whole for n in GROUPS}
    rows |= {title: mode for title, mode in ours.items() if title not in rows}
    if graphs:
        rows |= {f"{title}, graphs": replace(rows[title], graphs=True) for title in ("one GPU, ours", *best, stock)}
    if cuda:  # its ring takes a backend that gives the log-sum-exp, which the default one does not
        native = {f"{title}, cuDNN": replace(mode, backend="_native_cudnn") for title, mode in native.items()}
    rows |= {title: mode for title, mode in native.items() if title not in rows}
    rows |= {f"{title}, reordered": replace(ours[title], reorder=True) for title in whole}
    if graphs:
        rows |= {f"{title}, reordered, graphs": replace(ours[title], reorder=True, graphs=True) for title in whole}
        rows[f"{whole[0]}, reduce-overhead"] = replace(ours[whole[0]], compile_mode="reduce-overhead")
    rows["one GPU, diffusers, eager"] = Mode(eager=True)
    rows["one GPU, diffusers, again"] = Mode()
    return rows


GROUPS = (1, 2, 4)
"""Head groups of attention, side by side; the row without their number has as many as `Parallel` chooses."""


def _in_groups(mode: Mode, groups: int) -> Mode:
    return replace(mode, parallel={**mode.parallel, "overlap": groups})


def _degrees(ranks: int, branches: int) -> dict[str, dict[str, int]]:
    """Ours, by what `ranks` can be divided into."""
    found: dict[str, dict[str, int]] = {}
    if branches > 1:
        found["cfg 2" if ranks == 2 else f"cfg 2 × ulysses {ranks // 2}"] = {"cfg": 2, "ulysses": ranks // 2}
    found |= {f"{kind} {ranks}": {kind: ranks} for kind in ("gather", "ulysses", "ring")}
    for ring in range(2, ranks // 2 + 1):
        if ranks % ring == 0:
            found[f"ring {ring} × ulysses {ranks // ring}"] = {"ring": ring, "ulysses": ranks // ring}
    if branches > 1 and ranks > 2:
        found[f"cfg 2 × gather {ranks // 2}"] = {"cfg": 2, "gather": ranks // 2}
    return found


def _native(ranks: int) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {f"ulysses {ranks}": {"ulysses_degree": ranks}}
    if ranks > 2:
        found[f"ring 2 × ulysses {ranks // 2}"] = {"ring_degree": 2, "ulysses_degree": ranks // 2}
    return found | {f"ring {ranks}": {"ring_degree": ranks}}


@contextlib.contextmanager
def native_parallel(model: Any, mode: Mode) -> Iterator[None]:
    """diffusers' own context parallelism and backend, for a while. diffusers has no way to take parallelism off; this does it."""
    processors = [m.processor for m in model.modules() if hasattr(getattr(m, "processor", None), "_parallel_config")]
    # All attributes as they were: compiled code is chosen by which there are.
    before = [dict(vars(processor)) for processor in processors]
    try:
        if mode.backend is not None:
            model.set_attention_backend(mode.backend)
        if mode.native:
            model.enable_parallelism(config=D.ContextParallelConfig(**mode.native))
        yield
    finally:
        if model._parallel_config is not None:  # it is set also where the model then turns out to have no plan
            if model._cp_plan is not None:
                remove_context_parallel(model, model._cp_plan)
            model._parallel_config = None
        for processor, attributes in zip(processors, before):
            vars(processor).clear()
            vars(processor).update(attributes)


def many_graphs_a_block() -> None:
    """Every mode is a graph for each class of blocks, and all of them are kept: a mode that comes again compiles nothing."""
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.accumulated_recompile_limit = 1024
