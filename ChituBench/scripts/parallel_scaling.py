"""One picture on several GPUs: milliseconds a step of every mode, ours and diffusers' own, against one GPU in the same run.

    torchrun --standalone --nproc-per-node 4 ChituBench/scripts/parallel_scaling.py --size tiny --graphs     # a dry run on the CPU
    for shape in flux-1024 flux-2048 qwen-1024 sd3-1024 wan-480p; do     # twelve minutes; a process for each, in case one is lost
        timeout 170 torchrun --standalone --nproc-per-node 2 ChituBench/scripts/parallel_scaling.py --graphs \\
            --only $shape --keep --budget-seconds 115; done

Model shapes are the real ones with random weights, bfloat16, compiled by repeated block (speed does not depend on the
weights). Each mode is first compared with one GPU, then timed, then profiled. A rank whose host is late holds up the others, so
the microseconds of every host for a block are in the row too. What is compiled is kept for the modes that
follow. A row is printed and stored as soon as it is there; a mode that fails, or is refused, is a row that says why.

``--graphs`` adds rows in which the denoiser is one CUDA graph (`step_graphs.py`), and one with the graphs that torch.compile
makes itself (``mode="reduce-overhead"``). A recording that fails may take NCCL down with it, and the run: what there is, is stored.
``max-autotune`` is left out: it takes minutes to compile. So is inductor's ``cpp_wrapper``: with torch 2.13 it cannot call the
functional collectives ("arg type Any is not yet supported by custom_op_wrapper").
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from host_time import host_time
from scaling_modes import Mode, many_graphs_a_block, modes, native_parallel
from scaling_shapes import SHAPES, Shape
from step_graphs import recorded
from torch._dynamo.utils import counters

from chitu_diffusion import Parallel, patch
from chitu_diffusion.bench.kernel_kinds import by_kind
from chitu_diffusion.bench.timing import Budget, circumstances, store

TOLERANCE = {torch.bfloat16: 0.05, torch.float32: 1e-4}
"""Largest relative difference (2-norm of the latents after all steps) between a mode and one GPU."""

TIMEOUT = timedelta(seconds=120)
"""After which a rank that waits for another ends the run; what was measured is stored."""

# -- one row -----------------------------------------------------------------------------------------------------------


class Bench:
    """One pipeline and its calls.

    Args:
        shape: what to build and call.
        device: of this rank.
        options: of the command line.
    """

    def __init__(self, shape: Shape, device: torch.device, options: argparse.Namespace) -> None:
        self.device, self.steps, self.rounds, self.seconds = device, options.steps, options.rounds, options.seconds
        self.backend = options.backend or ("inductor" if options.size == "full" else "eager")
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        torch._dynamo.reset()
        torch.manual_seed(0)
        torch.set_default_dtype(self.dtype)
        with torch.device(device):
            self.pipe = shape.build(shape.config)
        torch.set_default_dtype(torch.float32)
        self.pipe.transformer.eval()
        self.model = self.pipe.transformer
        self.stock = {block: block._compiled_call_impl for block in self._blocks()}
        self.arguments = shape.arguments(device, self.dtype, self.steps)
        self.expected: torch.Tensor | None = None
        self.classes: set[type] = set()
        """Hooked classes of processors, which are gone with the last handle, and what was compiled for them too."""

    def _blocks(self) -> list[torch.nn.Module]:
        with patch(self.pipe) as handle:
            return [b.module for site in handle.sites.denoisers for stack in site.stacks for b in stack.blocks]

    def call(self, on_step: Callable[[], None] | None = None) -> torch.Tensor:
        """The final latents."""
        torch.compiler.cudagraph_mark_step_begin()

        def callback(*_: Any) -> dict[str, Any]:
            torch.compiler.cudagraph_mark_step_begin()
            if on_step is not None:
                on_step()
            return {}

        with torch.no_grad():
            found = self.pipe(
                **self.arguments, generator=torch.Generator().manual_seed(0), callback_on_step_end=callback
            )
        return found[0] if isinstance(found[0], torch.Tensor) else torch.stack(list(found[0]))

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    @contextlib.contextmanager
    def ready(self, mode: Mode) -> Iterator[dict[str, Any]]:
        """The model compiled and patched for `mode`; what the hooks report comes in the dict afterwards."""
        told: dict[str, Any] = {}
        with contextlib.ExitStack() as stack:
            for block, impl in self.stock.items():
                block._compiled_call_impl = impl
            stack.enter_context(native_parallel(self.model, mode))
            if not mode.eager:
                for block in self.stock:  # SD3's class does not name its repeated blocks to `compile_repeated_blocks`
                    block.compile(**mode.compile_arguments(self.backend))
            graphs = stack.enter_context(recorded(self.model, self.device)) if mode.graphs else None
            if mode.parallel or mode.patched:
                parallel = Parallel(**mode.parallel) if mode.parallel else None
                handle = stack.enter_context(patch(self.pipe, attention=mode.attention, parallel=parallel))
                self.classes |= {type(m.processor) for m in self.model.modules() if hasattr(m, "processor")}
                stack.callback(lambda: told.update(features=handle.report().to_dict()["features"]))
            if graphs is not None:
                stack.callback(lambda: told.update(replays=graphs.replays))
            yield told

    def run(self, mode: Mode) -> dict[str, Any]:
        """Correctness, then time, then where it goes."""
        row: dict[str, Any] = {}
        before = counters["stats"]["unique_graphs"]
        with self.ready(mode) as told:
            start = time.perf_counter()
            found = self.call().float()
            self.wait()
            row["compile_s"] = time.perf_counter() - start
            row["graphs_compiled"] = counters["stats"]["unique_graphs"] - before
            row["relative_difference"] = self._compare(found)
            row["correct"] = row["relative_difference"] < TOLERANCE[self.dtype]
            row |= self._time()
            try:
                row |= host_time(list(self.stock), self.call, self.wait)
                row["where_ms"] = self._profile()
            except Exception as error:  # the time is measured already, and worth more than its parts
                row["profile_failed"] = f"{type(error).__name__}: {error}"[:300]
        return row | told

    def _compare(self, found: torch.Tensor) -> float:
        if self.expected is None:
            self.expected = found
        return float((found - self.expected).norm() / self.expected.norm())

    def _time(self) -> dict[str, Any]:
        """Median and spread of the steps of some calls, milliseconds."""
        laps: list[float] = []
        until = time.monotonic() + self.seconds
        # Python's garbage collector takes tens of milliseconds on one rank, for which the others wait.
        gc.collect()
        gc.disable()
        try:
            for number in range(self.rounds):
                if number and not together(time.monotonic() < until):
                    break
                laps += self._laps()
        finally:
            gc.enable()
        row = {"ms": statistics.median(laps), "ms_low": min(laps), "ms_high": max(laps), "samples": len(laps)}
        if self.device.type == "cuda":
            row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        return row

    def _laps(self) -> list[float]:
        """Milliseconds of each step but the first two: the first of guidance in parallel runs every branch everywhere."""
        marks: list[Any] = []
        cuda = self.device.type == "cuda"

        def mark() -> None:
            marks.append(torch.cuda.Event(enable_timing=True) if cuda else time.perf_counter())
            if cuda:
                marks[-1].record()

        dist.barrier()
        self.call(mark)
        self.wait()
        pairs = list(itertools.pairwise(marks))[1:]
        return [a.elapsed_time(b) if cuda else 1e3 * (b - a) for a, b in pairs]

    def _profile(self) -> dict[str, float]:
        """Milliseconds a step by kind of kernel, of the steps after the second, and the time in which nothing ran."""
        if self.device.type != "cuda":
            return {}
        from torch.profiler import ProfilerActivity, profile

        seen = [0]
        profiler = profile(activities=[ProfilerActivity.CUDA])

        def count() -> None:
            seen[0] += 1
            if seen[0] == 2:
                self.wait()
                profiler.start()

        self.call(count)
        self.wait()
        profiler.stop()
        return by_kind(profiler.events(), self.steps - 2)


# -- the run -----------------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace, device: torch.device, ranks: int, rank: int) -> None:
    output = options.output or Path(f"outputs/parallel_x{ranks}.json")
    kept = json.loads(output.read_text()) if options.keep and output.is_file() else {"commands": [], "shapes": {}}
    found = circumstances(device)
    commands = [*kept["commands"], found.pop("command")]
    result: dict[str, Any] = {
        **found,
        "commands": commands,
        "ranks": ranks,
        "size": options.size,
        "shapes": kept["shapes"],
    }
    budget = Budget(options.budget_seconds)
    names = options.only or list(SHAPES[options.size])
    for number, name in enumerate(names):
        shape = SHAPES[options.size][name]
        rows = result["shapes"][name] = {}
        share = Budget(budget.left / (len(names) - number))  # a shape leaves what it does not need to those that follow
        bench = Bench(shape, device, options)
        for title, mode in modes(ranks, shape.branches, device.type == "cuda", options.graphs).items():
            if not _wanted(title, options.modes):
                continue
            started = time.monotonic()
            reserve = options.reserve_seconds
            if not together(share.left > reserve):
                rows[title] = {"skipped": f"{reserve:.0f} s were not left"}
                continue
            rows[title] = attempt(bench, mode)
            rows[title]["took_s"] = round(time.monotonic() - started, 1)
            if rank == 0:
                show(name, title, rows)
                store(output, result)
        del bench
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if rank == 0:
        store(output, result)
        print(f"stored {output}", flush=True)


def _wanted(title: str, words: list[str] | None) -> bool:
    """One GPU is always measured: the others are compared with it."""
    if not words or title in ("one GPU, diffusers", "one GPU, ours"):
        return True
    return any(word[1:] == title if word.startswith("=") else word in title for word in words)


def attempt(bench: Bench, mode: Mode) -> dict[str, Any]:
    """The row of `mode`, or why there is none; a mode that fails does not keep the others from being measured."""
    try:
        return bench.run(mode)
    except Exception as error:
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}"}


def together(yes: bool) -> bool:
    """Whether every rank says yes."""
    flag = torch.tensor([float(yes)], device="cuda" if torch.cuda.is_available() else "cpu")
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())


def show(shape: str, title: str, rows: dict[str, Any]) -> None:
    row = rows[title]
    if "ms" not in row:
        print(f"{shape:10} {title:32} {row}", flush=True)
        return
    singles = [r["ms"] for name, r in rows.items() if name.startswith("one GPU") and "ms" in r]
    print(
        f"{shape:10} {title:32} {row['ms']:9.2f} ms a step  {min(singles) / row['ms']:5.2f}×  off by "
        f"{row['relative_difference']:.1e}{'' if row['correct'] else ' WRONG'}  {row.get('where_ms', '')}  "
        f"host {row.get('host_us_a_block', '-')} of which running {row.get('host_processor_us_a_block', '-')} µs a block  "
        f"compiled {row['graphs_compiled']}, took {row['took_s']} s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure one picture on several GPUs, and store the numbers.")
    parser.add_argument("--size", choices=tuple(SHAPES), default="full")
    parser.add_argument("--only", nargs="*", choices=tuple(SHAPES["full"]), help="shapes; all of them if left out")
    parser.add_argument("--modes", nargs="*", help="words in the names of modes, or =NAME; all of them if left out")
    parser.add_argument("--graphs", action="store_true", help="also with the denoiser recorded as a CUDA graph")
    parser.add_argument(
        "--backend", help="of torch.compile; inductor if left out, and eager, which only traces, for tiny"
    )
    parser.add_argument("--steps", type=int, default=6, help="scheduler steps a call")
    parser.add_argument("--rounds", type=int, default=4, help="calls of each mode that steps are taken from, at most")
    parser.add_argument("--seconds", type=float, default=4, help="no further round is begun after them")
    parser.add_argument("--output", type=Path, help="outputs/parallel_xRANKS.json if left out")
    parser.add_argument("--keep", action="store_true", help="keep the other shapes that the output file has already")
    parser.add_argument("--budget-seconds", type=float, default=float("inf"), help="leave out what does not fit")
    parser.add_argument("--reserve-seconds", type=float, default=25, help="what one mode is reckoned to take")
    options = parser.parse_args()
    cuda = torch.cuda.is_available() and options.size == "full"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        dry_run()
    many_graphs_a_block()
    dist.init_process_group("nccl" if cuda else "gloo", timeout=TIMEOUT)
    try:
        measure(options, device, dist.get_world_size(), dist.get_rank())
    finally:
        dist.destroy_process_group()


def dry_run() -> None:
    """Let diffusers' own parallelism, which looks for an accelerator, run on the CPU."""
    torch.set_num_threads(1)
    torch._C._get_accelerator = lambda: torch.device("cpu")
    torch.accelerator.device_count = lambda: 1
    torch.cuda.is_available = lambda: False


if __name__ == "__main__":
    main()
