"""``chitu calibrate``: measure on a model what strategies need that have no published constants for it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from . import options as o
from .group import UserError, say


def calibrate(
    output: Annotated[
        str,
        typer.Option(
            "--output",
            help="YAML file to write; it must not exist yet.",
            metavar="FILE",
            rich_help_panel=o.FILES,
            show_default=False,
        ),
    ],
    prompt: o.Prompt = None,
    prompts: o.Prompts = None,
    negative_prompt: o.NegativePrompt = None,
    steps: o.Steps = None,
    guidance: o.Guidance = None,
    height: o.Height = None,
    width: o.Width = None,
    seed: o.Seed = 0,
    num_frames: o.NumFrames = None,
    set_: o.Set = None,
    model: o.Model = None,
    hook_map: o.HookMapFile = None,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    require_gpu: o.RequireGpu = False,
) -> None:
    """Run a pipeline once for each prompt, computing every step, and store what caches need to know of the model.

    The file is for `--cache magcache --cache-arg constants=FILE`; it serves any number of steps. Published constants
    of well-known models are found without it.
    """
    prompt_lines, arguments = o.read_prompts(prompt, prompts), o.scalars("--set", set_)
    file = Path(output).expanduser()
    if file.exists():
        raise UserError(f"--output {output!r} is there already; name a new file")
    if not file.parent.is_dir():
        raise UserError(f"--output {output!r}: there is no folder {str(file.parent)!r}")
    o.need_diffusers()
    from chitu_diffusion.runtime import DiffusionTask

    task = DiffusionTask(
        prompts=prompt_lines, negative_prompt=negative_prompt, steps=steps, guidance=guidance, height=height,
        width=width, seed=seed, num_frames=num_frames, arguments=arguments, model=model, hook_map=hook_map,
        dtype=dtype, device=device, require_gpu=require_gpu,
    )  # fmt: skip
    found = measure(task, file)
    say(
        f"measured {', '.join(found)} in {found['magcache']['steps']} steps; {file} is for --cache-arg constants={file}"
    )


def measure(given: Any, file: Path) -> dict[str, Any]:
    """Load, run and write; what the file holds, by strategy."""
    from chitu_diffusion.runtime import Generator
    from chitu_diffusion.runtime.generator import arguments_of, quiet, with_defaults

    from .show import showing_notes

    task = with_defaults(given)
    with showing_notes(), Generator.load(task) as generator:
        plan = generator.plan(task)
        calls = [{**arguments_of(prompt, task.seed, plan), "output_type": "latent"} for prompt in task.prompts]
        with quiet(generator.pipe):
            found = generator.handle.calibrate(calls, file)  # type: ignore[attr-defined]
    return {name: constants for name, constants in found.items() if name not in ("model", "measured")}
