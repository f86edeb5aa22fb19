"""One picture on several GPUs: milliseconds a step of every mode, ours and diffusers' own, against one GPU in the same run.

    torchrun --standalone --nproc-per-node 2 ChituBench/scripts/parallel_scaling.py --output ChituBench/results/parallel.json
    torchrun --standalone --nproc-per-node 2 ChituBench/scripts/parallel_scaling.py --size tiny     # a dry run on the CPU

Model shapes are the real ones with random weights, bfloat16, compiled by repeated block (speed does not depend on the
weights). Each mode is first compared with one GPU, then timed, then profiled. One GPU is timed first and last: a drift of the
clock would show. Results are written as they come.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers as D
import torch
import torch.distributed as dist
from kernel_kinds import by_kind

from chitu_diffusion import Parallel, patch
from chitu_diffusion.bench.timing import Budget, circumstances, store

TOLERANCE = {torch.bfloat16: 0.05, torch.float32: 1e-4}
"""Largest relative difference (2-norm of the latents after all steps) between a mode and one GPU."""


@dataclass(frozen=True)
class Shape:
    """What is drawn: how to build the pipeline, and its call."""

    build: Callable[[dict[str, Any]], Any]
    config: dict[str, Any]
    call: dict[str, Any]
    text: tuple[int, int]
    """Text tokens and their width."""
    branches: int = 1
    """Calls of the denoiser a step."""


@dataclass
class Mode:
    """One row of the table."""

    parallel: dict[str, int] = field(default_factory=dict)
    """Degrees of ours; empty: no parallelism."""
    native: dict[str, Any] = field(default_factory=dict)
    """Arguments of diffusers' `ContextParallelConfig`."""
    attention: str | None = None
    backend: str | None = None
    """Attention backend set in diffusers."""
    patched: bool = False
    overlap: bool = False
    """Let the compiler move exchanges away from where their results are used."""
    eager: bool = False


# -- the shapes --------------------------------------------------------------------------------------------------------


def _bare(cls: type, transformer: Any) -> Any:
    """A pipeline of the transformer and a scheduler; text embeddings are passed in and latents taken out."""
    names = cls._get_signature_keys(cls)[0]  # type: ignore[attr-defined]
    parts = dict.fromkeys(names)
    parts.update(transformer=transformer, scheduler=D.FlowMatchEulerDiscreteScheduler())
    pipe = cls(**{name: part for name, part in parts.items() if name in names})
    pipe.set_progress_bar_config(disable=True)
    return pipe


def flux(config: dict[str, Any]) -> Any:
    return _bare(D.FluxPipeline, D.FluxTransformer2DModel(**config, guidance_embeds=True))


def qwen(config: dict[str, Any]) -> Any:
    return _bare(D.QwenImagePipeline, D.QwenImageTransformer2DModel(**config))


def wan(config: dict[str, Any]) -> Any:
    return _bare(D.WanPipeline, D.WanTransformer3DModel(**config))


FLUX: dict[str, Any] = {}
QWEN: dict[str, Any] = {}
WAN = {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}
SMALL = {"num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 2}

SHAPES = {
    "full": {
        "flux-1024": Shape(flux, FLUX, {"height": 1024, "width": 1024}, (512, 4096)),
        "flux-2048": Shape(flux, FLUX, {"height": 2048, "width": 2048}, (512, 4096)),
        "qwen-1024": Shape(qwen, QWEN, {"height": 1024, "width": 1024, "true_cfg_scale": 4.0}, (128, 3584), 2),
        "wan-480p": Shape(wan, WAN, {"height": 480, "width": 832, "num_frames": 81}, (512, 4096), 2),
    },
    "tiny": {
        "flux-1024": Shape(
            flux,
            {**SMALL, "num_single_layers": 2, "joint_attention_dim": 32, "axes_dims_rope": (4, 6, 6)},
            {"height": 128, "width": 128},
            (16, 32),
        ),
        "qwen-1024": Shape(
            qwen,
            {**SMALL, "joint_attention_dim": 32, "axes_dims_rope": (4, 6, 6)},
            {"height": 128, "width": 128, "true_cfg_scale": 4.0},
            (16, 32),
            2,
        ),
        "wan-480p": Shape(
            wan, {**SMALL, "ffn_dim": 64, "text_dim": 32}, {"height": 64, "width": 64, "num_frames": 5}, (16, 32), 2
        ),
    },
}


def modes(ranks: int, branches: int, cuda: bool) -> dict[str, Mode]:
    """The rows, in the order in which they are run. What cannot be taken off a model again comes last."""
    auto = "auto" if cuda else None
    rows = {
        "one GPU, diffusers": Mode(),
        "one GPU, diffusers, eager": Mode(eager=True),
        "one GPU, ours": Mode(patched=True, attention=auto),
        f"gather {ranks}": Mode({"gather": ranks}, attention=auto),
        f"ulysses {ranks}": Mode({"ulysses": ranks}, attention=auto),
        f"gather {ranks}, overlapped": Mode({"gather": ranks}, attention=auto, overlap=True),
        f"ulysses {ranks}, overlapped": Mode({"ulysses": ranks}, attention=auto, overlap=True),
    }
    rows[f"ring {ranks}"] = Mode({"ring": ranks}, attention=auto)
    if ranks > 2:
        rows[f"gather 2 × ulysses {ranks // 2}"] = Mode({"gather": 2, "ulysses": ranks // 2}, attention=auto)
    if branches > 1:
        rows["cfg 2"] = Mode({"cfg": 2}, attention=auto)
        if ranks > 2:
            rows[f"cfg 2 × ulysses {ranks // 2}"] = Mode({"cfg": 2, "ulysses": ranks // 2}, attention=auto)
            rows[f"cfg 2 × gather {ranks // 2}"] = Mode({"cfg": 2, "gather": ranks // 2}, attention=auto)
    rows[f"gather {ranks}, eager"] = Mode({"gather": ranks}, attention=auto, eager=True)
    rows["one GPU, diffusers, again"] = Mode()
    rows[f"diffusers ulysses {ranks}"] = Mode(native={"ulysses_degree": ranks})
    if cuda:
        rows[f"diffusers ulysses {ranks}, cuDNN"] = Mode(native={"ulysses_degree": ranks}, backend="_native_cudnn")
    return rows


# -- one row -----------------------------------------------------------------------------------------------------------


class Bench:
    """One pipeline and its calls.

    Args:
        shape: what to build and call.
        device: of this rank.
        steps: scheduler steps a call.
    """

    def __init__(self, shape: Shape, device: torch.device, steps: int) -> None:
        self.shape, self.device, self.steps = shape, device, steps
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        torch.manual_seed(0)
        torch.set_default_dtype(self.dtype)
        with torch.device(device):
            self.pipe = shape.build(shape.config)
        torch.set_default_dtype(torch.float32)
        self.pipe.transformer.eval()
        self.model = self.pipe.transformer
        self.stock = {block: block._compiled_call_impl for block in self._blocks()}
        self.arguments = self._arguments()
        self.expected: torch.Tensor | None = None

    def _blocks(self) -> list[torch.nn.Module]:
        repeated = set(getattr(self.model, "_repeated_blocks", ()))
        return [module for module in self.model.modules() if type(module).__name__ in repeated]

    def _arguments(self) -> dict[str, Any]:
        tokens, width = self.shape.text
        generator = torch.Generator().manual_seed(1)

        def embeddings() -> torch.Tensor:
            return torch.randn(1, tokens, width, generator=generator).to(self.device, self.dtype)

        found = {"prompt_embeds": embeddings(), "output_type": "latent", "num_inference_steps": self.steps}
        if self.shape.build is flux:
            found["pooled_prompt_embeds"] = torch.randn(1, 768, generator=generator).to(self.device, self.dtype)
        else:
            found["negative_prompt_embeds"] = embeddings()
        return {**found, **self.shape.call}

    def call(self, on_step: Callable[[], None] | None = None) -> torch.Tensor:
        """The final latents."""

        def callback(*_: Any) -> dict[str, Any]:
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
        torch._dynamo.reset()
        for block, impl in self.stock.items():
            block._compiled_call_impl = impl
        if mode.backend is not None:
            self.model.set_attention_backend(mode.backend)
        if mode.native and self.model._parallel_config is None:  # diffusers cannot take it off again
            self.model.enable_parallelism(config=D.ContextParallelConfig(**mode.native))
        told: dict[str, Any] = {}
        with overlapping(mode.overlap):
            if not mode.eager:
                self.model.compile_repeated_blocks(fullgraph=True, dynamic=False)
            with contextlib.ExitStack() as stack:
                if mode.parallel or mode.patched:
                    parallel = Parallel(**mode.parallel) if mode.parallel else None
                    handle = stack.enter_context(patch(self.pipe, attention=mode.attention, parallel=parallel))
                    stack.callback(lambda: told.update(handle.report().to_dict()))
                yield told

    def run(self, mode: Mode, rounds: int) -> dict[str, Any]:
        """Correctness, then time, then where it goes."""
        row: dict[str, Any] = {}
        with self.ready(mode) as told:
            start = time.perf_counter()
            found = self.call().float()
            self.wait()
            row["compile_s"] = time.perf_counter() - start
            row["relative_difference"] = self._compare(found)
            row["correct"] = row["relative_difference"] < TOLERANCE[self.dtype]
            laps = [lap for _ in range(rounds) for lap in self._laps()]
            row["ms"] = statistics.median(laps)
            row["ms_low"], row["ms_high"], row["samples"] = min(laps), max(laps), len(laps)
            if self.device.type == "cuda":
                row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
            row["where_ms"] = {}
            try:
                row["where_ms"] = self._profile()
            except Exception as error:  # the time is measured already, and worth more than its parts
                row["profile_failed"] = f"{type(error).__name__}: {error}"[:300]
        if told:
            row["features"] = told["features"]
        return row

    def _compare(self, found: torch.Tensor) -> float:
        if self.expected is None:
            self.expected = found
        difference = float((found - self.expected).norm() / self.expected.norm())
        return difference

    def _laps(self) -> list[float]:
        """Milliseconds of each step but the first two: the first of guidance in parallel runs every branch everywhere."""
        marks: list[Any] = []
        cuda = self.device.type == "cuda"

        def mark() -> None:
            marks.append(torch.cuda.Event(enable_timing=True) if cuda else time.perf_counter())
            if cuda:
                marks[-1].record()

        if dist.is_initialized():
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


@contextlib.contextmanager
def overlapping(wanted: bool) -> Iterator[None]:
    """Inductor starts exchanges as early, and waits for them as late, as the data allow."""
    if not wanted:
        yield
        return
    from torch._inductor import config

    passes = ["raise_comms", "sink_waits"]
    with config.patch(reorder_for_compute_comm_overlap=True, reorder_for_compute_comm_overlap_passes=passes):
        yield


# -- the run -----------------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace, device: torch.device, ranks: int, rank: int) -> None:
    result: dict[str, Any] = {**circumstances(device), "ranks": ranks, "size": options.size, "shapes": {}}
    budget = Budget(options.budget_seconds)
    shapes = SHAPES[options.size]
    for name in options.only or shapes:
        shape = shapes[name]
        rows: dict[str, Any] = {}
        result["shapes"][name] = rows
        bench = Bench(shape, device, options.steps)
        for title, mode in modes(ranks, shape.branches, device.type == "cuda").items():
            if options.modes and not any(word in title for word in (*options.modes, "one GPU, diffusers")):
                continue
            if not together(budget.left > options.reserve_seconds):
                rows[title] = {"skipped": f"{options.reserve_seconds:.0f} s were not left"}
                continue
            rows[title] = attempt(bench, mode, options.rounds)
            if rank == 0:
                show(name, title, rows)
                store(options.output, result)
        del bench
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if rank == 0:
        store(options.output, result)
        print(f"stored {options.output}", flush=True)


def attempt(bench: Bench, mode: Mode, rounds: int) -> dict[str, Any]:
    """The row of `mode`, or why there is none; a mode that fails does not keep the others from being measured."""
    try:
        return bench.run(mode, rounds)
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
        f"{row['relative_difference']:.1e}{'' if row['correct'] else ' WRONG'}  {row['where_ms']}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure one picture on several GPUs, and store the numbers.")
    parser.add_argument("--size", choices=tuple(SHAPES), default="full")
    parser.add_argument("--only", nargs="*", choices=tuple(SHAPES["full"]), help="shapes; all of them if left out")
    parser.add_argument("--modes", nargs="*", help="words in the names of modes; all of them if left out")
    parser.add_argument("--steps", type=int, default=8, help="scheduler steps a call")
    parser.add_argument("--rounds", type=int, default=3, help="calls of each mode that steps are taken from")
    parser.add_argument("--output", type=Path, default=Path("outputs/parallel_scaling.json"))
    parser.add_argument("--budget-seconds", type=float, default=float("inf"), help="leave out what does not fit")
    parser.add_argument("--reserve-seconds", type=float, default=45, help="what one mode is reckoned to take")
    options = parser.parse_args()
    cuda = torch.cuda.is_available() and options.size == "full"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        dry_run()
    dist.init_process_group("nccl" if cuda else "gloo")
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
