"""Speed of well-known transformers on one GPU, with random weights: kernels and caches, ours and others', eager and compiled.

    python ChituBench/scripts/model_shapes.py --output ChituBench/results/model_shapes.json    # one H200, under six minutes
    python ChituBench/scripts/model_shapes.py --size tiny                                      # a dry run on the CPU

Speed does not depend on the weights, and pictures of random weights say nothing, so this is about speed only. Caches are made
to skip about every second step, whatever the data, so that all of them do the same amount of work. What is timed is the whole
call without text encoders and VAE. Results are written as they come; what no longer fits into the budget is left out, and said.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers.utils import logging as diffusers_logging
from scaling_shapes import SHAPES, Shape

from chitu_diffusion import patch
from chitu_diffusion.bench.cases import Case
from chitu_diffusion.bench.compiled import compile_blocks
from chitu_diffusion.bench.errors import one_line
from chitu_diffusion.bench.kinds import KINDS, Setting
from chitu_diffusion.bench.timing import Budget, Stopwatch, circumstances, store
from chitu_diffusion.flexcache import make_params
from chitu_diffusion.runtime.metrics import FlopMeter
from chitu_hooks import Call, ChituWarning, Feature, Order, StepCall


def nothing(steps: int) -> str:
    """No file of constants: the cases bring theirs."""
    return ""


@dataclass(frozen=True)
class Model:
    """A row of the tables."""

    title: str
    full: Shape
    tiny: Shape
    steps: int
    """Scheduler steps of a call."""
    rounds: int
    """Counted calls of each setting."""


MODELS = {
    "flux": Model("FLUX.1-dev, 1024²", SHAPES["full"]["flux-1024"], SHAPES["tiny"]["flux-1024"], 16, 2),
    "qwen": Model("Qwen-Image, 1024²", SHAPES["full"]["qwen-1024"], SHAPES["tiny"]["qwen-1024"], 12, 2),
    "sd3": Model("SD3.5 Large, 1024²", SHAPES["full"]["sd3-1024"], SHAPES["tiny"]["sd3-1024"], 12, 2),
    "wan": Model("Wan2.1-1.3B, 480p, 81 frames", SHAPES["full"]["wan-480p"], SHAPES["tiny"]["wan-480p"], 6, 1),
}


def caches(steps: int) -> dict[str, tuple[str, str, dict[str, Any]]]:
    """Title -> kind of `bench.kinds`, cache, and parameters that skip every second step whatever the data."""
    half = {"threshold": 1e9, "max_consecutive": 1}
    ones = [1.0] * (steps - 1)
    ours: dict[str, dict[str, Any]] = {
        "static": {"steps": "uniform", "budget": steps // 2},
        "meancache": {"steps": "uniform", "budget": steps // 2, "window": 2},
        "fbcache": half,
        "magcache": {**half, "ratios": ones, "retention": 0.0},
        "easycache": {**half, "warmup": 1, "cooldown": 0},
        "teacache": {**half, "coefficients": [1.0, 0.0], "cooldown": 0},
        "taylorseer": {"interval": 2, "order": 1, "warmup": 2},
        "blockdance": {"boundary": 0.9, "group": 2, "begin": 0.1, "end": 1.0},
        "pab": {"interval": 2, "begin": 0.1, "end": 1.0},
    }
    peers: dict[str, tuple[str, str, dict[str, Any]]] = {
        "cache-dit dbcache": (
            "cache-dit", "dbcache",
            {"Fn_compute_blocks": 1, "max_warmup_steps": 1, "residual_diff_threshold": 1e9, "max_continuous_cached_steps": 1},
        ),
        "diffusers magcache": (
            "diffusers", "magcache",
            {"threshold": 1e9, "max_skip_steps": 1, "retention_ratio": 0.0, "mag_ratios": [1.0, *ones]},
        ),
        "diffusers taylorseer": ("diffusers", "taylorseer", {"cache_interval": 2, "disable_cache_before_step": 2}),
    }  # fmt: skip
    return {**{name: ("chitu", name, params) for name, params in ours.items()}, **peers}


class Watch(Feature):
    """Marks the end of every step, and which of them computed all of the denoiser."""

    name = "watch"
    exactness = "exact"
    order = Order.CLOCK

    def __init__(self, device: torch.device) -> None:
        self.marks = Stopwatch(device)
        self.skipped: list[bool] = []
        self._skips = False

    def denoiser_in(self, call: Call) -> None:
        if not self.marks.marks:
            self.marks.mark()

    def denoiser_out(self, call: Call) -> None:
        self._skips = self._skips or call.skipping or call.replaced

    def step_out(self, step: StepCall) -> None:
        self.marks.mark()
        self.skipped.append(self._skips)
        self._skips = False


class Bench:
    """One model, and the calls that are timed."""

    def __init__(self, model: Model, tiny: bool, device: torch.device) -> None:
        self.model, self.device, self.tiny = model, device, tiny
        self.shape = model.tiny if tiny else model.full
        self.steps = 6 if tiny else model.steps
        self.attention = "auto"
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        torch.manual_seed(0)
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                self.pipe = self.shape.build(self.shape.config)
        finally:
            torch.set_default_dtype(torch.float32)
        self.transformer = self.pipe.transformer.eval().requires_grad_(False)
        self.arguments = self.shape.arguments(device, dtype, self.steps)

    def compile(self) -> None:
        compile_blocks(self.pipe, **({"backend": "eager"} if self.tiny else {}))

    def eager_again(self) -> None:
        """Take compiling off."""
        torch._dynamo.reset()
        for module in self.transformer.modules():
            module._compiled_call_impl = None

    @contextlib.contextmanager
    def on(self, kind: str, use: str, params: dict[str, Any]) -> Iterator[Any]:
        """The pipeline with a cache and, for ours, the kernel that `auto` takes; hooked in every case."""
        if kind == "chitu":
            cache = make_params(use, params) if use else None
            with patch(self.pipe, attention=self.attention, cache=cache) as handle:
                yield handle
            return
        case = Case(kind=kind, use=use, params=params, steps=self.steps, family=use)
        missing = KINDS[kind].missing()
        if missing is not None:
            raise RuntimeError(missing)
        with KINDS[kind].on(Setting(pipe=self.pipe, hook_map=None, constants=nothing, profile=nothing), case) as handle:
            yield handle

    def call(self, handle: Any) -> tuple[float, list[float], list[bool]]:
        """Milliseconds of denoising, of each step, and which steps skipped."""
        watch = Watch(self.device)
        with handle.also(watch), torch.no_grad():
            self.pipe(**self.arguments, generator=torch.Generator().manual_seed(0))
        laps = watch.marks.laps()
        return sum(laps), laps, watch.skipped

    def measure(self, kind: str, use: str, params: dict[str, Any]) -> dict[str, Any]:
        """One setting: `rounds` calls after one that warms up and compiles."""
        began = time.monotonic()
        with self.on(kind, use, params) as handle:
            self.call(handle)
            warm = time.monotonic() - began
            calls = [self.call(handle) for _ in range(self.model.rounds)]
            report = handle.report()
        steps = [(lap, skip) for _, laps, skips in calls for lap, skip in list(zip(laps, skips))[1:]]
        skipped = [lap for lap, skip in steps if skip]
        # Which steps a peer skipped is not seen from outside; its cheapest step is one of them.
        computed = [lap for lap, skip in steps if not skip and kind in ("chitu", "baseline")]
        return {
            "denoise_ms": statistics.median(total for total, _, _ in calls),
            "ms": statistics.median(computed) if computed else None,
            "ms_low": min(lap for lap, _ in steps),
            "ms_high": max(lap for lap, _ in steps),
            "skipped_ms": statistics.median(skipped) if skipped else None,
            "skipped_steps": sum(calls[-1][2]),
            "steps": self.steps,
            "calls": len(calls),
            "bytes_held": report.bytes_held if kind == "chitu" and use else None,
            "warm_up_s": round(warm, 2),
            "attention": next((f["chosen"] for f in report.to_dict()["features"] if "chosen" in f), None),
        }

    def flops(self) -> float | str:
        """FLOPs of one step of all branches."""
        meter = FlopMeter()
        with patch(self.pipe) as handle, handle.also(meter), torch.no_grad():
            self.pipe(**self.arguments, generator=torch.Generator().manual_seed(0))
        full = meter.flops.get("full")
        return full / self.steps if full else str(meter.flops)


def matmul_rate(device: torch.device, tiny: bool) -> float:
    """TFLOP/s of a large matrix product: what a floor of a step is reckoned with."""
    size = 256 if tiny else 8192
    dtype = torch.float32 if tiny else torch.bfloat16
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    times = []
    for _ in range(10):
        watch = Stopwatch(device)
        watch.mark()
        for _ in range(5):
            a @ b
        watch.mark()
        times.append(watch.laps()[0] / 5)
    return 2 * size**3 / statistics.median(times[3:]) / 1e9


STOCK, OURS = "stock", 'attention="auto"'


def measure_model(bench: Bench, row: dict[str, Any], budget: Budget, keep: Any) -> None:
    """Fill `row`, and call `keep` after every setting."""
    title = bench.model.title

    def attempt(mode: str, name: str, kind: str, use: str, params: dict[str, Any], seconds: float) -> None:
        if not budget.allows(f"{title}, {mode}, {name}", 0 if bench.tiny else seconds):
            return
        try:
            found = bench.measure(kind, use, params)
        except Exception as error:  # one that fails is a result too, and the others go on
            found = {"failed": one_line(error)}
        reference = row[mode].get(STOCK, {}).get("denoise_ms")
        if reference and "denoise_ms" in found:
            found["speedup"] = reference / found["denoise_ms"]
        row[mode][name] = found
        keep()
        show(title, mode, name, found)

    row.update(title=title, steps=bench.steps, branches=bench.shape.branches, eager={}, compiled={})
    row["flops_step"] = bench.flops()
    plain = {STOCK: ("baseline", "", {}), OURS: ("chitu", "", {})}
    for name, (kind, use, params) in plain.items():
        attempt("eager", name, kind, use, params, 8)
    bench.compile()
    for name, (kind, use, params) in plain.items():
        attempt("compiled", name, kind, use, params, 30)
    each = 1.3e-3 * row["compiled"].get(STOCK, {}).get("denoise_ms", 3000) * (bench.model.rounds + 1) / 2
    ours = {name: case for name, case in caches(bench.steps).items() if case[0] == "chitu"}
    peers = {name: case for name, case in caches(bench.steps).items() if case[0] != "chitu"}
    for name, (kind, use, params) in ours.items():
        attempt("compiled", name, kind, use, params, each)
    attempt("compiled", f"{STOCK}, again", "baseline", "", {}, each)
    for name, (kind, use, params) in peers.items():  # last: some leave something behind
        attempt("compiled", name, kind, use, params, each + 6)
    bench.eager_again()
    for name, (kind, use, params) in peers.items():
        if "failed" in row["compiled"].get(name, {}):
            attempt("eager", name, kind, use, params, 1.5 * each)


def show(title: str, mode: str, name: str, found: dict[str, Any]) -> None:
    if "failed" in found:
        print(f"{title:30} {mode:9} {name:22} failed: {found['failed']}", flush=True)
        return
    words = [f"{found['ms']:9.2f} ms a step" if found["ms"] else f"{found['ms_low']:9.2f} ms the cheapest"]
    if found["skipped_ms"]:
        words.append(f"skipped {found['skipped_ms']:7.3f} ms ({found['skipped_steps']} of {found['steps']})")
    words.append(f"denoise {found['denoise_ms']:9.1f} ms {found.get('speedup', 1):5.2f}×")
    print(f"{title:30} {mode:9} {name:22} {', '.join(words)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=("full", "tiny"), default="full")
    parser.add_argument(
        "--only", nargs="*", choices=tuple(MODELS), default=list(MODELS), help="models; all if left out"
    )
    parser.add_argument("--budget-seconds", type=float, default=345, help="leave out what does not fit")
    parser.add_argument("--output", type=Path, default=Path("outputs/model_shapes.json"))
    options = parser.parse_args()
    tiny = options.size == "tiny"
    device = torch.device("cpu" if tiny else "cuda")
    budget = Budget(float("inf") if tiny else options.budget_seconds)
    diffusers_logging.set_verbosity_error()
    warnings.simplefilter("ignore", ChituWarning)  # that so few steps are not what a cache is for
    result: dict[str, Any] = {
        "what": "speed only: random weights",
        "size": options.size,
        **circumstances(device),
        "matmul_tflops": matmul_rate(device, tiny),
        "models": {},
        "left_out": budget.skipped,
    }
    print(f"matrix product: {result['matmul_tflops']:.1f} TFLOP/s", flush=True)
    for number, name in enumerate(options.only):
        # Each of the models that are left has the same share of the time: one that compiles long takes from its own.
        share = Budget(budget.left / (len(options.only) - number), skipped=budget.skipped)
        row: dict[str, Any] = {}
        result["models"][name] = row
        began = time.monotonic()
        try:
            bench = Bench(MODELS[name], tiny, device)
            measure_model(bench, row, share, lambda: store(options.output, result))
        except Exception as error:
            row["failed"] = one_line(error)
            print(f"{name}: {row['failed']}", flush=True)
        print(f"{name} took {time.monotonic() - began:.0f} s", flush=True)
        bench = None  # type: ignore[assignment]
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        store(options.output, result)
    print(f"stored {options.output}", flush=True)


if __name__ == "__main__":
    main()
