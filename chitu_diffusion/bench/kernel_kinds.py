"""Where the time of a step goes, by the names of the kernels that the profiler saw."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch.autograd import DeviceType  # type: ignore[attr-defined]


def by_kind(events: Any, steps: int) -> dict[str, float]:
    """Kernel milliseconds a step by kind. `exposed` is when only collectives ran, `idle` when nothing did."""
    spans: list[tuple[float, float, str]] = []
    for event in events:
        if event.device_type == DeviceType.CUDA:
            spans.append((event.time_range.start, event.time_range.end, kind_of(event.name)))
    totals: dict[str, float] = {}
    for start, end, kind in spans:
        totals[kind] = totals.get(kind, 0.0) + (end - start) / 1e3 / steps
    work = sum_of_union([(a, b) for a, b, kind in spans if kind != "collective"])
    busy = sum_of_union([(a, b) for a, b, _ in spans])
    whole = max((b for _, b, _ in spans), default=0.0) - min((a for a, _, _ in spans), default=0.0)
    totals["exposed collective"] = (busy - work) / 1e3 / steps
    totals["idle"] = (whole - busy) / 1e3 / steps
    return {kind: round(value, 3) for kind, value in sorted(totals.items())}


KINDS = (
    ("collective", ("nccl",)),
    ("matmul", ("triton_tem",)),
    ("fused pointwise", ("triton",)),  # their names list what they were made of, attention and matmul too
    ("attention", ("fmha", "flash", "attention", "attn", "sdpa", "mha")),
    ("matmul", ("gemm", "nvjet", "cutlass", "xmma", "matmul", "splitk", "cublas")),
    ("copy", ("memcpy", "memset", "copy_kernel", "catarray")),
)
"""Kind, and words of which one is in the kernel's name; the first that fits."""


def kind_of(name: str) -> str:
    lower = name.lower()
    return next((kind for kind, words in KINDS if any(word in lower for word in words)), "other")


def exchange_seconds(work: Callable[[], Any], cuda: bool) -> tuple[Any, float]:
    """What `work` returned, and the seconds in which ranks exchanged meanwhile.

    On a GPU those in which nothing else ran; on the CPU those between the start and the end of some exchange, waiting for
    the other ranks included.
    """
    from torch.profiler import ProfilerActivity, profile

    profiler = profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU])
    with silent():
        profiler.start()
    found = work()
    with silent():
        profiler.stop()
    events = profiler.events()
    if cuda:
        return found, by_kind(events, 1)["exposed collective"] / 1e3
    spans = [(e.time_range.start, e.time_range.end) for e in events if e.name.startswith("gloo:")]
    return found, sum_of_union(spans) / 1e6


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Without the lines that the profiler's C++ of torch 2.13 prints when it starts and stops."""
    sys.stderr.flush()
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def sum_of_union(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total
