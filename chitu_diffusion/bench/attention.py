"""How fast each attention kernel is: at the shapes of well-known models, and on the grid that `attention="auto"` reads.

Shape legend: B batch, S tokens (as many queries as keys), H heads, D head dim. No masks. FLOPs of one call: 4·B·H·S²·D.
"""

from __future__ import annotations

import functools
import math
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from chitu_diffusion.attention import AttentionCall, Kernel, kernels
from chitu_diffusion.attention.fastest import FILE, Row, read_rows, write_rows
from chitu_diffusion.attention.kernel import word

from .timing import Budget, circumstances, in_turns, store, summary


class Shape(NamedTuple):
    B: int
    S: int
    H: int
    D: int

    @property
    def flops(self) -> int:
        return 4 * self.B * self.H * self.S**2 * self.D


SHAPES = {
    "FLUX 1024²": Shape(1, 4608, 24, 128),
    "FLUX 2048²": Shape(1, 16896, 24, 128),
    "SD3.5 1024²": Shape(2, 4250, 38, 64),
    "Wan 480p, 81 frames": Shape(1, 32760, 12, 128),
}
TINY_SHAPES = {"tiny": Shape(1, 128, 2, 64), "tiny, batch 2": Shape(2, 77, 3, 32)}

DIMS = (64, 96, 128, 256)
LENGTHS = (256, 1024, 4096, 16384, 32768)
TINY_DIMS, TINY_LENGTHS = (32, 64), (64, 128)
GRID_HEADS = 16
GRID_TOKENS = 8192
"""Batch size times length of short calls on the grid: enough to fill the device in one launch."""

WRITES_OUT_SCORES = ("sdpa_math", "diffusers:_native_math", "diffusers:flex")
"""Kernels that keep every score in memory when they are not compiled: not in the race, and tens of GB at these lengths."""


def usable_kernels(all_of_them: bool) -> tuple[dict[str, Kernel], dict[str, str]]:
    """The kernels to measure, loaded; and name -> reason for those that cannot be."""
    found, reasons = {}, {}
    for name, kernel in kernels().items():
        reason = kernel.available()
        if reason is None and name in WRITES_OUT_SCORES and not all_of_them:
            reason = "writes out every score: not measured"
        if reason is None:
            try:
                kernel.load()
            except (ImportError, OSError, RuntimeError, AttributeError, ValueError) as error:
                reason = f"is installed and does not load: {error}"
        if reason is None:
            found[name] = kernel
        else:
            reasons[name] = reason
    return found, reasons


def measure(
    shape: Shape, dtype: torch.dtype, device: torch.device, candidates: dict[str, Kernel], rounds: int
) -> tuple[dict[str, Any], dict[str, str]]:
    """Name -> median, quartiles and TFLOP/s at one shape, from the fastest; and name -> why it is not there."""
    g = torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn(shape.B, shape.S, shape.H, shape.D, generator=g, device=device, dtype=dtype) for _ in range(3)
    )
    call = AttentionCall(dtype, device.type, shape.D, shape.H, shape.H, shape.D, key_tokens=shape.S)
    work: dict[str, Callable[[], Any]] = {}
    reasons: dict[str, str] = {}
    for name, kernel in candidates.items():
        run = functools.partial(kernel.run, q, k, v, None, False, None)
        reason = kernel.refusal(call)
        if reason is None:
            try:
                run()
                if device.type == "cuda":
                    torch.cuda.synchronize()
            except Exception as error:  # a kernel that fails is a result too
                reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if reason is None:
            work[name] = run
        else:
            reasons[name] = reason
    # One call of half a millisecond or more is one sample; shorter ones are averaged.
    calls = max(1, min(10, round(0.3e12 / shape.flops))) if device.type == "cuda" else 1
    samples = in_turns(work, device, rounds=rounds, calls=calls)
    found = {name: summary(times) for name, times in samples.items()}
    for numbers in found.values():
        numbers["tflops"] = shape.flops / numbers["median_ms"] / 1e9
    return dict(sorted(found.items(), key=lambda item: item[1]["median_ms"])), reasons


def measure_shapes(
    device: torch.device, *, tiny: bool, rounds: int, tell: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Every usable kernel at every named shape, in bfloat16."""
    candidates, _ = usable_kernels(tiny)
    rows = []
    for name, shape in (TINY_SHAPES if tiny else SHAPES).items():
        found, reasons = measure(shape, torch.bfloat16, device, candidates, rounds)
        rows.append({"shape": name, **shape._asdict(), "dtype": "bfloat16", "kernels": found, "not measured": reasons})
        for kernel, numbers in found.items():
            tell(f"{name:22} {kernel:28} {numbers['median_ms']:9.3f} ms {numbers['tflops']:7.1f} TFLOP/s")
    return rows


def measure_grid(
    device: torch.device, dtype: torch.dtype, *, tiny: bool, rounds: int, tell: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Our own kernels that are not lossy, for every head dim and length bucket of the table."""
    candidates, _ = usable_kernels(tiny)
    own = {n: k for n, k in candidates.items() if k.exactness != "lossy" and not n.startswith("diffusers:")}
    rows = []
    for dim in TINY_DIMS if tiny else DIMS:
        for length in TINY_LENGTHS if tiny else LENGTHS:
            heads = GRID_HEADS if length <= GRID_TOKENS else GRID_HEADS // 2
            shape = Shape(1 if tiny else max(1, GRID_TOKENS // length), length, 2 if tiny else heads, dim)
            found, reasons = measure(shape, dtype, device, own, rounds)
            rows.append({**shape._asdict(), "dtype": word(dtype), "kernels": found, "not measured": reasons})
            tell(f"{word(dtype)} head dim {dim:3} {length:6} tokens: " + _ranked(found))
    return rows


def _ranked(found: dict[str, Any]) -> str:
    return ", ".join(f"{name} {numbers['tflops']:.1f}" for name, numbers in found.items()) or "none"


def table_rows(grid: Iterable[dict[str, Any]], shapes: Sequence[dict[str, Any]], capability: str) -> list[Row]:
    """The rows of the table: one per measurement of the grid, ranked by all measurements that fall into its bucket.

    The grid has round lengths; a named shape in the same bucket may be ragged, where kernels rank differently.
    """
    measured = [row for row in grid if row["kernels"]]
    rows = []
    for row in measured:
        same = [r for r in measured if (r["dtype"], r["D"]) == (row["dtype"], row["D"])]
        next_length = min((r["S"] for r in same if r["S"] > row["S"]), default=math.inf)
        named = [
            shape
            for shape in shapes
            if (shape["dtype"], shape["D"]) == (row["dtype"], row["D"]) and row["S"] <= shape["S"] < next_length
        ]
        rows.append(Row(capability, row["dtype"], row["D"], row["S"], ranked_kernels(row, named)))
    return rows


def ranked_kernels(row: dict[str, Any], named: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """The kernels of a grid measurement, by the geometric mean of their speed relative to the best at each shape."""

    def speed(kernel: str) -> float:
        found = [measured["kernels"] for measured in (row, *named) if kernel in measured["kernels"]]
        best = [max(k[name]["tflops"] for name in row["kernels"] if name in k) for k in found]
        return math.prod(k[kernel]["tflops"] / b for k, b in zip(found, best)) ** (1 / len(found))

    return tuple(sorted(row["kernels"], key=speed, reverse=True))


def write_table(grid: list[dict[str, Any]], shapes: list[dict[str, Any]], device: torch.device) -> Path:
    """Put what was measured into the table, for this device's capability; dtypes that were not measured stay.

    Returns:
        The file. Without a CUDA device it is not changed: the table speaks of CUDA devices only.
    """
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        capability = f"{major}.{minor}"
        measured = {row["dtype"] for row in grid}
        kept = [row for row in read_rows() if row.capability == capability and row.dtype not in measured]
        write_rows(capability, [*kept, *table_rows(grid, shapes, capability)])
    return FILE


def fill_table(
    result: dict[str, Any], device: torch.device, dtype: torch.dtype, output: Path | None, tiny: bool, tell: Any
) -> None:
    """Measure the grid in one dtype, put it into the table, and keep a copy of the table in `output`."""
    result["grid"] += measure_grid(device, dtype, tiny=tiny, rounds=3, tell=tell)
    keep_table(result, device, output)


def keep_table(result: dict[str, Any], device: torch.device, output: Path | None) -> None:
    """Write the table from what has been measured so far, and store both in `output`."""
    path = write_table(result["grid"], result["shapes"], device)
    if output is not None:
        store(output / "attention.json", result)
        shutil.copy(path, output / path.name)


def bench_attention(
    output: Path | None = None,
    *,
    write: bool = False,
    quick: bool = False,
    tiny: bool = False,
    budget: Budget | None = None,
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16),
    tell: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Measure, print as it goes, and store after every part.

    Args:
        output: folder for ``attention.json`` and a copy of the table; None stores nothing.
        write: measure the grid first, in `dtypes`, and put it into the table.
        quick: fewer rounds, and the grid in the first of `dtypes` only.
        tiny: shapes that a CPU does in seconds; a dry run.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    budget = budget or Budget(float("inf"))
    result: dict[str, Any] = circumstances(device)
    result.update(shapes=[], grid=[], unusable=usable_kernels(tiny)[1], skipped=budget.skipped)
    with torch.no_grad():
        for dtype in (dtypes[:1] if quick else dtypes) if write else ():
            if budget.allows(f"grid in {word(dtype)}", 0 if tiny else 25):
                fill_table(result, device, dtype, output, tiny, tell)
        if budget.allows("named shapes", 0 if tiny else 15):
            result["shapes"] = measure_shapes(device, tiny=tiny, rounds=3 if quick or tiny else 10, tell=tell)
    if write:
        keep_table(result, device, output)
    elif output is not None:
        store(output / "attention.json", result)
    return result
