"""What the hooks cost: time to patch, milliseconds a step hooked against unhooked, and a skipped step.

Runs the FLUX.1-dev transformer shape with random weights (speed does not depend on the weights), 1024x1024, batch 1::

    python ChituBench/scripts/overhead.py --output ChituBench/results/overhead.json
    python ChituBench/scripts/overhead.py --size tiny        # a dry run on the CPU

Hooked and unhooked calls alternate in one process; what is quoted are medians and their ratio.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

from chitu_diffusion import Static, patch
from chitu_hooks import Feature

SIZES = {
    "flux-dev": {"layers": 19, "single": 38, "heads": 24, "head_dim": 128, "text": 4096, "pixels": 1024, "tokens": 512},
    "tiny": {"layers": 19, "single": 38, "heads": 2, "head_dim": 16, "text": 32, "pixels": 128, "tokens": 16},
}
ROPE = {128: (16, 56, 56), 16: (4, 6, 6)}


class Watcher(Feature):
    """Overrides every method of the interface and changes nothing: the dearest feature that does no work."""

    name = "watcher"

    def step_in(self, step: Any) -> None: ...
    def step_out(self, step: Any) -> None: ...
    def denoiser_in(self, call: Any) -> None: ...
    def denoiser_out(self, call: Any) -> None: ...
    def trunk_in(self, call: Any, streams: Any) -> None: ...
    def trunk_out(self, call: Any, streams: Any) -> None: ...
    def block_in(self, call: Any, block: Any, inputs: Any) -> None: ...
    def block_out(self, call: Any, block: Any, outputs: Any) -> None: ...
    def attention(self, q: Any, k: Any, v: Any, ctx: Any) -> None: ...


def build(size: dict[str, int], device: str) -> FluxPipeline:
    """A FLUX.1-dev shaped pipeline with random weights, made on `device`; text embeddings are passed in."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
    with torch.device(device):
        transformer = FluxTransformer2DModel(
            num_layers=size["layers"],
            num_single_layers=size["single"],
            num_attention_heads=size["heads"],
            attention_head_dim=size["head_dim"],
            joint_attention_dim=size["text"],
            guidance_embeds=True,
            axes_dims_rope=ROPE[size["head_dim"]],
        ).eval()
    torch.set_default_dtype(torch.float32)
    pipe = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=None,
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        transformer=transformer,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


class Bench:
    """Calls of one pipeline, timed step by step.

    Args:
        pipe: what to call.
        size: one of `SIZES`.
        steps: scheduler steps a call.
    """

    def __init__(self, pipe: FluxPipeline, size: dict[str, int], steps: int) -> None:
        parameter = next(pipe.transformer.parameters())
        kind = {"device": parameter.device, "dtype": parameter.dtype}
        self.pipe = pipe
        self.cuda = parameter.is_cuda
        self.device = parameter.device
        self.call = {
            "prompt_embeds": torch.randn(1, size["tokens"], size["text"], **kind),
            "pooled_prompt_embeds": torch.randn(1, 768, **kind),
            "height": size["pixels"],
            "width": size["pixels"],
            "num_inference_steps": steps,
            "output_type": "latent",
        }

    def milliseconds(self) -> list[float]:
        """Milliseconds of each step but the first."""
        marks: list[Any] = []

        def mark(*_: Any) -> dict[str, Any]:
            marks.append(torch.cuda.Event(enable_timing=True) if self.cuda else time.perf_counter())
            if self.cuda:
                marks[-1].record()
            return {}

        self.pipe(**self.call, callback_on_step_end=mark, generator=torch.Generator().manual_seed(0))
        if self.cuda:
            torch.cuda.synchronize()
            return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
        return [1e3 * (b - a) for a, b in itertools.pairwise(marks)]

    def compare(self, settings: dict[str, Callable[[], Any]], rounds: int) -> dict[str, dict[str, float]]:
        """Each setting once a round, in turn; median, spread and ratio to the first."""
        samples: dict[str, list[float]] = {name: [] for name in settings}
        for number in range(rounds + 1):
            for name, patched in settings.items():
                with patched():
                    times = self.milliseconds()
                if number:  # the first round warms up
                    samples[name] += times
        base = statistics.median(next(iter(samples.values())))
        return {
            name: {
                "ms": statistics.median(times),
                "ms_low": min(times),
                "ms_high": max(times),
                "ratio": statistics.median(times) / base,
                "samples": len(times),
            }
            for name, times in samples.items()
        }

    def skipped_step(self, repeats: int = 3) -> float:
        """Milliseconds of a step whose trunk is skipped, a warm-up call dropped."""
        with patch(self.pipe, cache=Static(steps=(0,))) as handle:
            times = [time_ms for _ in range(repeats + 1) for time_ms in self.milliseconds()]
            hits = handle.report().features[0]["hits"]
        if not hits:
            raise RuntimeError("no step was skipped, so there is nothing to time")
        return statistics.median(times[len(times) // (repeats + 1) :])


def hook_microseconds(pipe: FluxPipeline, repeats: int = 2000) -> dict[str, float]:
    """Python of the block seam alone, microseconds a block call: a block that does nothing, hooked and not."""
    block = pipe.transformer.transformer_blocks[0]
    result: dict[str, float] = {}
    stock = block.forward
    block.forward = lambda hidden_states, encoder_hidden_states, temb=None: (encoder_hidden_states, hidden_states)
    tensor = torch.zeros(1, 1, 1)
    try:
        for name, features in (("unhooked", ()), ("static", None), ("watcher", (Watcher(),))):
            cache = Static(steps=range(1000)) if features is None else None
            with patch(pipe, cache=cache, features=features or ()) as handle:
                result[name] = _per_call(handle, block, tensor, repeats)
    finally:
        block.forward = stock
    base = result.pop("unhooked")
    return {name: value - base for name, value in result.items()}


def _per_call(handle: Any, block: Any, tensor: torch.Tensor, repeats: int) -> float:
    from chitu_hooks.call import Call, StackRun
    from chitu_hooks.state import ACTIVE, Branch, Generation

    engine = handle._engine
    generation = Generation(engine, handle.pipe)
    denoiser = engine.sites.denoisers[0]
    call = Call(engine, generation, denoiser, (), {})
    call.branch = Branch(denoiser, "cond", 0, (), None)
    call.branch.last_called = {stack.number: stack.last for stack in denoiser.stacks}
    run = StackRun()
    run.entry = {"image": tensor, "text": tensor}
    call.runs[0] = run
    ACTIVE.call = call
    best = float("inf")
    try:
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(repeats):
                block(hidden_states=tensor, encoder_hidden_states=tensor, temb=tensor)
            best = min(best, time.perf_counter() - start)
    finally:
        ACTIVE.call = None
    return best / repeats * 1e6


def patch_milliseconds(pipe: FluxPipeline) -> dict[str, float]:
    """Milliseconds of `patch(...)` on the loaded pipeline, the first call and the median of later ones."""
    times = []
    for _ in range(6):
        start = time.perf_counter()
        handle = patch(pipe, cache=Static(steps=(0, 1, 3)), attention="sdpa_math")
        times.append(1e3 * (time.perf_counter() - start))
        handle.undo()
    return {"first": times[0], "median": statistics.median(times[1:])}


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    print(f"[{time.perf_counter() - start:6.1f} s] {name}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="flux-dev")
    parser.add_argument("--steps", type=int, default=6, help="scheduler steps a call")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds; a warm-up round comes first")
    parser.add_argument("--no-compile", action="store_true", help="leave out the compiled half")
    parser.add_argument("--output", type=Path, help="where to write the JSON")
    options = parser.parse_args()
    size = SIZES[options.size]
    device = "cuda" if options.size == "flux-dev" else "cpu"

    with stage("build"):
        pipe = build(size, device)
    bench = Bench(pipe, size, options.steps)
    variants: dict[str, Callable[[], Any]] = {
        "unhooked": contextlib.nullcontext,
        "plain patch": lambda: patch(pipe),
        "static, every step computed": lambda: patch(pipe, cache=Static(steps=range(1000))),
        "every seam watched": lambda: patch(pipe, features=(Watcher(),)),
    }
    result: dict[str, Any] = {
        "what": "cost of the hooks, FLUX.1-dev shape, random weights" if device == "cuda" else "dry run",
        "machine": torch.cuda.get_device_name() if device == "cuda" else platform.processor(),
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip(),
        "command": " ".join(["python", *sys.argv]),
    }
    result["patch_ms"] = patch_milliseconds(pipe)
    result["block_us"] = hook_microseconds(pipe)
    print(json.dumps({key: result[key] for key in ("patch_ms", "block_us")}), flush=True)
    for mode in ("eager",) if options.no_compile else ("eager", "compiled"):
        if mode == "compiled":
            with stage("compile"):
                backend = {} if device == "cuda" else {"backend": "eager"}
                pipe.transformer.compile_repeated_blocks(fullgraph=True, **backend)
                bench.milliseconds()
        with stage(f"{mode}: compare"):
            result[mode] = bench.compare(variants, options.rounds)
            result[mode]["skipped step"] = {"ms": bench.skipped_step()}
        for name, row in result[mode].items():
            print(f"  {mode:9s} {name:28s} " + "  ".join(f"{k} {v:.4g}" for k, v in row.items()), flush=True)
        if options.output:
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
