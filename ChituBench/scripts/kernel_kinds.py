"""Where the time of a step goes, by the names of the kernels that the profiler saw."""

from __future__ import annotations

from typing import Any

import torch


def by_kind(events: Any, steps: int) -> dict[str, float]:
    """Kernel milliseconds a step by kind. `exposed` is when only collectives ran, `idle` when nothing did."""
    spans: list[tuple[float, float, str]] = []
    for event in events:
        if event.device_type == torch.autograd.DeviceType.CUDA:
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


def sum_of_union(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total
