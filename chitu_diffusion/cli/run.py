"""``chitu run``: draw pictures or clips and write them, with everything about how they came to be."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options as o
from .ranks import starts_ranks

if TYPE_CHECKING:
    from chitu_diffusion.runtime import DiffusionTask, Generator, Result


def run(
    prompt: o.Prompt = None,
    prompts: o.Prompts = None,
    negative_prompt: o.NegativePrompt = None,
    steps: o.Steps = None,
    guidance: o.Guidance = None,
    height: o.Height = None,
    width: o.Width = None,
    seed: o.Seed = 0,
    num_images: Annotated[
        int | None,
        typer.Option("--num-images", help="Pictures or clips per prompt.", metavar="N", rich_help_panel=o.PICTURE),
    ] = None,
    image: o.Image = None,
    mask: o.Mask = None,
    num_frames: o.NumFrames = None,
    fps: Annotated[
        float | None,
        typer.Option("--fps", help="Frames per second of a clip.", metavar="N", rich_help_panel=o.PICTURE),
    ] = None,
    set_: o.Set = None,
    model: o.Model = None,
    hook_map: o.HookMapFile = None,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    require_gpu: o.RequireGpu = False,
    attention: o.Attention = None,
    cache: o.Cache = None,
    cache_arg: o.CacheArg = None,
    nproc: o.Nproc = None,
    cfg_parallel: o.CfgParallel = None,
    ulysses: o.Ulysses = None,
    ring: o.Ring = None,
    gather: o.Gather = None,
    overlap: o.Overlap = None,
    encode_prompt: o.EncodePrompt = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            help="Folder to write; it must not exist yet. A new one under outputs/ if left out.",
            metavar="FOLDER",
            rich_help_panel=o.FILES,
        ),
    ] = None,
) -> None:
    """Draw pictures or clips of a prompt, with the embedded model or any diffusers pipeline.

    The output folder gets the pictures (PNG) or clips (MP4, or lossless WebP without ffmpeg), `request.json` (every
    option as given and as used), `report.json` (what the hooks did) and `metrics.json` (seconds per
    stage, peak memory, FLOPs). An option that the pipeline has no use for is an error, never ignored.
    """
    prompt_lines = o.read_prompts(prompt, prompts)
    cache_args, arguments = o.pairs("--cache-arg", cache_arg), o.scalars("--set", set_)
    o.need_diffusers()
    from chitu_diffusion.runtime import DiffusionTask

    task = DiffusionTask(
        prompts=prompt_lines, negative_prompt=negative_prompt, steps=steps, guidance=guidance, height=height,
        width=width, seed=seed, num_images=num_images, image=image, mask=mask, num_frames=num_frames, fps=fps,
        arguments=arguments, model=model, hook_map=hook_map, dtype=dtype, device=device, require_gpu=require_gpu,
        attention=attention, cache=cache, cache_args=cache_args, nproc=nproc,
        cfg_parallel=cfg_parallel, ulysses=ulysses, ring=ring, gather=gather, overlap=overlap,
        encode_prompt=encode_prompt, output=output,
    )  # fmt: skip
    if not starts_ranks(task):
        draw(task)


def draw(given: DiffusionTask) -> None:
    """Load, generate, write and show one task.

    Raises:
        ChituError: a mistake in it; nothing is left behind in the output folder's place.
    """
    from rich.console import Console

    from chitu_diffusion.parallel.launch import at_end
    from chitu_diffusion.runtime import Generator, Progress, new_folder, write_result
    from chitu_diffusion.runtime.generator import choose, with_defaults
    from chitu_diffusion.runtime.output import default_folder

    from .ranks import in_world
    from .show import show_result, showing_notes

    console = Console()
    task = with_defaults(given)
    with in_world(task) as first:
        choose(task)
        if not first:
            with Generator.load(task) as generator:
                generator.generate(task)
            return
        folder = Path(task.output) if task.output is not None else default_folder(task.prompts[0])
        with showing_notes(), new_folder(folder) as temporary:
            at_end.append(lambda: shutil.rmtree(temporary, ignore_errors=True))
            with Generator.load(task, watchers=(Progress(Console(stderr=True)),)) as generator:
                result = generator.generate(task)
                names = write_result(temporary, result, request_of(given, result, generator))
    show_result(console, folder, names, result)


def request_of(given: DiffusionTask, result: Result, generator: Generator) -> dict[str, Any]:
    """What ``request.json`` holds: the options as given, as used, and the call that they became."""
    from chitu_diffusion.runtime.generator import used

    from .env import versions

    return {
        "given": given.to_json(),
        "used": used(result.task, generator.handle).to_json(),
        "call": result.plan.to_json(),
        "pipeline": result.pipeline,
        "scheduler": type(generator.pipe.scheduler).__name__ if getattr(generator.pipe, "scheduler", None) else None,
        "hook_map": result.reports[-1]["hook_map"],
        "versions": versions("chitu-diffusion", "torch", "diffusers", "transformers"),
    }
