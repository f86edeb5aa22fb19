"""``chitu bench parallel``: one process against several, in every mode, ours and diffusers' own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options as o
from .group import UserError, is_rank, say

if TYPE_CHECKING:
    from chitu_diffusion.bench.parallel import Plan

PLAN = "What is measured"
PROMPT = "a red apple on a blue background"


def _option(panel: str, name: str, text: str, metavar: str | None = None) -> Any:
    return typer.Option(name, help=text, rich_help_panel=panel, metavar=metavar, show_default=False)


def parallel(
    nproc: Annotated[
        str | None,
        _option(
            PLAN,
            "--nproc",
            "Numbers of processes, such as 2,4,8, each measured by itself; all GPUs, or 2 on a CPU, if left out.",
            "N,N",
        ),
    ] = None,
    modes: Annotated[
        str | None,
        _option(PLAN, "--modes", "Only modes with one of these words in their names, such as cfg,gather.", "WORDS"),
    ] = None,
    peers: Annotated[
        str, _option(PLAN, "--peers", "diffusers' own context parallelism too if left out, or none.", "NAMES")
    ] = "diffusers",
    repeats: Annotated[int, _option(PLAN, "--repeats", "Timed pictures of each mode, 3 if left out.", "N")] = 3,
    compiled: Annotated[
        bool, _option(PLAN, "--compile", "Compile the repeated blocks; eager steps on a fast GPU wait for the host.")
    ] = False,
    attention: o.Attention = None,
    prompt: o.Prompt = None,
    negative_prompt: o.NegativePrompt = None,
    steps: o.Steps = None,
    guidance: o.Guidance = None,
    height: o.Height = None,
    width: o.Width = None,
    num_frames: o.NumFrames = None,
    seed: o.Seed = 0,
    set_: o.Set = None,
    model: o.Model = None,
    hook_map: o.HookMapFile = None,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    require_gpu: o.RequireGpu = False,
    output: Annotated[
        Path,
        _option(
            o.FILES, "--output", "Folder of results, outputs/bench-parallel if left out; continued if there.", "FOLDER"
        ),
    ] = Path("outputs/bench-parallel"),
) -> None:
    """One picture on one process and on several: cfg, ulysses, ring, gather and every product that takes all of them.

    Each mode first has to give the picture of one process, else it is a row that says how far it is off. Speed-ups are over the
    fastest single process of the same run. What is stored already is not measured again.
    """
    o.at_least_1({"--repeats": repeats})
    counts = read_counts(nproc) if nproc is not None else None
    if peers not in ("diffusers", "none"):
        raise UserError(f"--peers {peers!r} is not possible here; it is diffusers or none")
    arguments = o.scalars("--set", set_)
    o.need_diffusers()
    from chitu_diffusion.attention import make_attention
    from chitu_diffusion.bench.parallel import Plan
    from chitu_diffusion.runtime import DiffusionTask
    from chitu_diffusion.runtime.generator import with_defaults

    task = DiffusionTask(
        prompts=(prompt or PROMPT,), negative_prompt=negative_prompt, steps=steps, guidance=guidance, height=height,
        width=width, num_frames=num_frames, seed=seed, arguments=arguments, model=model, hook_map=hook_map, dtype=dtype,
        device=device, require_gpu=require_gpu,
    )  # fmt: skip
    if attention is not None:
        make_attention(attention)
    plan = Plan(
        task=with_defaults(task), output=output, repeats=repeats, attention=attention, compiled=compiled,
        peers=peers != "none", only=tuple(word.strip() for word in modes.split(",")) if modes else (),
    )  # fmt: skip
    _run(plan, counts)


def _run(plan: Plan, counts: list[int] | None) -> None:
    """As a rank, measure; else start the ranks, one number of them after another, and publish."""
    from chitu_diffusion.bench.parallel_ranks import measure
    from chitu_diffusion.bench.publish import publish
    from chitu_diffusion.parallel.environment import find_world

    world = find_world()
    if world is not None:
        measure(plan, world)
        if is_rank() or world.rank:
            return
    else:
        _start(plan, counts or [default_count(plan.task.device)])
    for path in publish([plan.output], plan.output):
        print(path)


def _start(plan: Plan, counts: list[int]) -> None:
    from chitu_diffusion.bench.results import Results
    from chitu_diffusion.parallel.launch import launch
    from chitu_diffusion.runtime.loading import model_source, pick_device

    from .ranks import check_devices

    # What is wrong with the model, the device or the folder is told before anything is started.
    model_source(plan.task.model)
    pick_device(plan.task.device, plan.task.require_gpu)
    for count in counts:
        check_devices(plan.task.device, count)
    Results(plan.output, "parallel")
    for count in counts:
        try:
            failure = launch(["-m", "chitu_diffusion.cli.main", *sys.argv[1:]], count)
        except KeyboardInterrupt:
            say(f"interrupted; what was measured is in {plan.output}, and the same command continues there")
            sys.exit(130)
        if failure is not None:
            if failure.details:
                print(failure.details, file=sys.stderr)
            say(f"{failure.message}; what was measured is in {plan.output}, and the same command continues there")
            sys.exit(failure.code)


def default_count(device: str) -> int:
    """All GPUs; two processes where there are none."""
    import torch

    return max(2, torch.cuda.device_count()) if device in ("auto", "cuda") else 2


def read_counts(text: str) -> list[int]:
    """``2,4`` as numbers.

    Raises:
        UserError: one is no whole number from 2.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 1 for word in words):
        raise UserError(
            f"--nproc {text!r} is not a list of whole numbers from 2, such as 2,4; one process is always measured"
        )
    return sorted({int(word) for word in words})
