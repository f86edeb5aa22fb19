"""``chitu calibrate``: measure on a model what strategies need that have no published constants for it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from . import options as o
from .group import UserError, say


def calibrate(
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            help="YAML file of constants to write; it must not exist yet.",
            metavar="FILE",
            rich_help_panel=o.FILES,
            show_default=False,
        ),
    ] = None,
    planned: Annotated[
        str | None,
        typer.Option(
            "--planned",
            help="Profile of the planned cache to write, .safetensors; it must not exist yet. Takes 4 prompts or more.",
            metavar="FILE",
            rich_help_panel=o.FILES,
            show_default=False,
        ),
    ] = None,
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

    The file of --output is for `--cache magcache --cache-arg constants=FILE`; it serves any number of steps. Published
    constants of well-known models are found without it. The file of --planned is for `--cache planned --cache-arg
    profile=FILE --cache-arg budget=0.4`, with these steps, size and guidance; what to expect of it is shown.
    """
    prompt_lines, arguments = o.read_prompts(prompt, prompts), o.scalars("--set", set_)
    if output is None and planned is None:
        raise UserError("nothing to write: name a file with --output, --planned or both")
    file, profile = _new_file("--output", output), _new_file("--planned", planned)
    if profile is not None and profile.suffix != ".safetensors":
        raise UserError(f"--planned {planned!r}: the name of a profile ends in .safetensors")
    if file is not None and file == profile:
        raise UserError(f"--output and --planned are both {output!r}; name two files")
    o.need_diffusers()
    from chitu_diffusion.runtime import DiffusionTask

    task = DiffusionTask(
        prompts=prompt_lines, negative_prompt=negative_prompt, steps=steps, guidance=guidance, height=height,
        width=width, seed=seed, num_frames=num_frames, arguments=arguments, model=model, hook_map=hook_map,
        dtype=dtype, device=device, require_gpu=require_gpu,
    )  # fmt: skip
    found = measure(task, file, profile)
    if file is not None:
        names = ", ".join(name for name in found if name != "planned")
        say(f"measured {names} in {found['magcache']['steps']} steps; {file} is for --cache-arg constants={file}")
    if profile is not None:
        show_plans(found["planned"])
        say(f"{profile} is for --cache planned --cache-arg profile={profile} --cache-arg budget=0.4")


def _new_file(option: str, name: str | None) -> Path | None:
    if name is None:
        return None
    file = Path(name).expanduser()
    if file.exists():
        raise UserError(f"{option} {name!r} is there already; name a new file")
    if not file.parent.is_dir():
        raise UserError(f"{option} {name!r}: there is no folder {str(file.parent)!r}")
    return file


def show_plans(found: dict[str, Any]) -> None:
    """A table of what budgets give; what was tried was tried on prompts that were left out of the plan."""
    from rich.console import Console

    from .show import table

    console = Console()
    size, guidance = "×".join(map(str, found["size"])), ", ".join(f"{k} {v:g}" for k, v in found["guidance"].items())
    console.print(
        f"{found['model']}: {found['steps']} steps of {found['scheduler']}, latents {size}, {guidance or 'no guidance'}, "
        f"{found['samples']} samples",
        highlight=False,
        soft_wrap=True,
    )
    made = table("planned", "steps", "error", "PSNR expected", "tried", "worst", "computes", numbers=("steps", "error"))
    for row in found["plans"]:
        decibels = [_decibels(row[name]) for name in ("expected", "psnr", "worst")]
        steps, computes = f"{row['steps']} of {found['steps']}", " ".join(str(step) for step in row["computes"])
        made.add_row(f"{row['speedup']:.2f}×", steps, f"{row['error']:.2g}", *decibels, computes)
    made.columns[-1].overflow = "fold"
    console.print(made)
    if all(row["psnr"] is None for row in found["plans"]):
        console.print("PSNR is not known: the calls returned latents", highlight=False)


def _decibels(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} dB"


def measure(given: Any, file: Path | None, profile: Path | None = None) -> dict[str, Any]:
    """Load, run and write; what was found, by strategy."""
    from chitu_diffusion.runtime import Generator
    from chitu_diffusion.runtime.generator import arguments_of, quiet, with_defaults

    from .show import showing_notes

    task = with_defaults(given)
    with showing_notes(), Generator.load(task) as generator:
        plan = generator.plan(task)
        shape = {"output_type": "latent" if profile is None else "np"}
        seeds = range(task.seed, task.seed + len(task.prompts))
        calls = [{**arguments_of(p, seed, plan), **shape} for p, seed in zip(task.prompts, seeds)]
        with quiet(generator.pipe):
            found = generator.handle.calibrate(calls, file, profile)  # type: ignore[attr-defined]
    return {name: constants for name, constants in found.items() if name not in ("model", "measured")}
