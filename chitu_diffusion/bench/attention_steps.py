"""Milliseconds of one FLUX.1-dev step with each attention kernel, eager and compiled, random weights.

Everything goes through ``pipe(…)``, hooked and unhooked alike, in turns in one process; a step is the time between two
ends of a step as the pipeline reports them, so scheduler and hooks are in it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo.config
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from diffusers.utils import logging as diffusers_logging

from chitu_diffusion import patch
from chitu_diffusion.attention import kernels

from .timing import Budget, Stopwatch, summary

FLUX_DEV = dict(
    patch_size=1,
    in_channels=64,
    num_layers=19,
    num_single_layers=38,
    attention_head_dim=128,
    num_attention_heads=24,
    joint_attention_dim=4096,
    pooled_projection_dim=768,
    guidance_embeds=True,
    axes_dims_rope=(16, 56, 56),
)
"""The published configuration of FLUX.1-dev."""
TINY_FLUX = dict(
    FLUX_DEV,
    in_channels=4,
    num_layers=1,
    num_single_layers=2,
    attention_head_dim=16,
    num_attention_heads=2,
    joint_attention_dim=32,
    pooled_projection_dim=32,
    axes_dims_rope=(4, 4, 8),
)

STOCK = "stock"
CANDIDATES = (STOCK, "auto", "diffusers' _native_cudnn", "sdpa_cudnn", "fa3", "diffusers' _native_flash", "sdpa_flash")
"""In the order of how much they are missed when time is short."""
TINY_CANDIDATES = (STOCK, "auto", "diffusers' _native_math", "sdpa_math", "sdpa_flash")
IN_DIFFUSERS = "diffusers' "

STEPS = 5
"""Steps of one call; the first is not counted."""
EAGER_SECONDS = 15
COMPILE_SECONDS = 22
FURTHER_COMPILE_SECONDS = 12
ROUND_SECONDS = 1
"""Roughly what each part takes on one H200, for the budget."""


def build(tiny: bool, device: torch.device) -> FluxPipeline:
    """A FLUX pipeline without text encoders and VAE; the weights are drawn on the device, in bfloat16."""
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            transformer = FluxTransformer2DModel(**(TINY_FLUX if tiny else FLUX_DEV))
    finally:
        torch.set_default_dtype(before)
    nothing = dict.fromkeys(("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    pipe = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(), transformer=transformer.eval().requires_grad_(False), **nothing
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def call(pipe: FluxPipeline, tiny: bool, device: torch.device) -> list[float]:
    """Milliseconds of each step but the first of one call: 4096 image and 512 text tokens, batch 1."""
    g = torch.Generator(device).manual_seed(0)
    text, channels, pooled = (6, 32, 32) if tiny else (512, 4096, 768)
    watch = Stopwatch(device)

    def on_step_end(pipe: Any, step: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        watch.mark()
        return {}

    pipe(
        prompt_embeds=torch.randn(1, text, channels, generator=g, device=device, dtype=torch.bfloat16),
        pooled_prompt_embeds=torch.randn(1, pooled, generator=g, device=device, dtype=torch.bfloat16),
        height=32 if tiny else 1024,
        width=32 if tiny else 1024,
        num_inference_steps=STEPS,
        guidance_scale=3.5,
        output_type="latent",
        generator=g,
        callback_on_step_end=on_step_end,
    )
    return watch.laps()


@contextlib.contextmanager
def on(pipe: FluxPipeline, name: str) -> Iterator[Any]:
    """The pipeline with a candidate on: nothing, a backend set in diffusers, or ours through `patch`."""
    default = _AttentionBackendRegistry._active_backend
    if name == STOCK:
        yield None
    elif name.startswith(IN_DIFFUSERS):
        try:
            pipe.transformer.set_attention_backend(name.removeprefix(IN_DIFFUSERS))
            yield None
        finally:
            pipe.transformer.reset_attention_backend()
            _AttentionBackendRegistry.set_active_backend(default)  # diffusers does not put it back
    else:
        with patch(pipe, attention=name) as handle:
            yield handle


def usable(names: tuple[str, ...]) -> tuple[list[str], dict[str, str]]:
    """The candidates that can be used here, and name -> reason for the others."""
    found, reasons = [], {}
    for name in names:
        kernel = kernels().get("diffusers:" + name.removeprefix(IN_DIFFUSERS) if IN_DIFFUSERS in name else name)
        reason = kernel.available() if kernel is not None else None
        if reason is None:
            found.append(name)
        else:
            reasons[name] = reason
    return found, reasons


@torch._dynamo.config.patch(recompile_limit=64)  # one graph of each block class for each candidate
def measure_steps(
    *,
    tiny: bool,
    rounds: int,
    budget: Budget,
    result: dict[str, Any],
    keep: Callable[[], None],
    tell: Callable[..., Any],
) -> None:
    """Fill ``result["steps"]`` with one row for eager and one for compiled; `keep` is called after each."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names, result["steps not measured"] = usable(TINY_CANDIDATES if tiny else CANDIDATES)
    result["steps"] = []
    if not budget.allows("FLUX steps", 0 if tiny else EAGER_SECONDS + 10):
        return
    diffusers_logging.set_verbosity_error()  # it warns at every choice of a backend
    pipe = build(tiny, device)
    for compiled in (False, True):
        mode = "compiled" if compiled else "eager"
        if compiled:
            if not budget.allows("compiled FLUX steps", 0 if tiny else COMPILE_SECONDS + 10):
                return
            options = {"backend": "eager"} if tiny else {}
            pipe.transformer.compile_repeated_blocks(fullgraph=True, **options)
        samples: dict[str, list[float]] = {}
        chosen: dict[str, Any] = {}
        for name in names:  # warm-up; compiling each candidate's graphs
            cost = (COMPILE_SECONDS if not samples else FURTHER_COMPILE_SECONDS) if compiled else 2
            if tiny or budget.allows(f"{mode} step, {name}", cost):
                try:
                    with on(pipe, name) as handle:
                        call(pipe, tiny, device)
                        if handle is not None:
                            chosen[name] = handle.report().features[0]
                    samples[name] = []
                except Exception as error:  # one that fails is a result too, and the others go on
                    result["steps not measured"][name] = f"{mode}: {type(error).__name__}: {error}"[:500]
                    tell(f"FLUX step {mode:9} {name:26} fails: {type(error).__name__}: {error}")
        for _ in range(rounds):
            if not tiny and budget.left < ROUND_SECONDS * len(samples):
                break
            for name in samples:
                with on(pipe, name):
                    samples[name] += call(pipe, tiny, device)
        found = {name: summary(times) for name, times in samples.items() if times}
        for name, numbers in found.items():
            numbers["ratio_to_stock"] = numbers["median_ms"] / found[STOCK]["median_ms"]
            tell(
                f"FLUX step {mode:9} {name:26} {numbers['median_ms']:8.2f} ms, {numbers['ratio_to_stock']:.3f} of stock"
            )
        result["steps"].append({"mode": mode, "candidates": found, "chosen": chosen})
        keep()
