"""``chitu bench flexcache`` and ``chitu bench collect``: speed and quality of caches, ours and others'."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from . import options as o
from .group import UserError, say

PLAN = "What is measured"
QUICK_PROMPTS = 3


def _option(panel: str, name: str, text: str, metavar: str | None = None) -> Any:
    return typer.Option(name, help=text, rich_help_panel=panel, metavar=metavar, show_default=False)


def flexcache(
    cases: Annotated[
        Path | None, _option(PLAN, "--cases", "YAML file of cases; the shipped one if left out.", "FILE")
    ] = None,
    prompts: Annotated[
        str | None,
        _option(
            PLAN,
            "--prompts",
            "UTF-8 file with one prompt a line, or a shipped list: flexcache, 32 prompts, if left out; of these, tuning "
            "is the first 8, on which the shipped cases' parameters were set, and test the other 24.",
            "FILE",
        ),
    ] = None,
    limit: Annotated[int | None, _option(PLAN, "--limit", "Only the first N prompts.", "N")] = None,
    seeds: Annotated[
        str, _option(PLAN, "--seeds", "Seeds that every prompt is drawn with, such as 0,1; 0 if left out.", "N,N")
    ] = "0",
    peers: Annotated[
        str,
        _option(
            PLAN, "--peers", "Which other makers' cases are run too; diffusers,cache-dit if left out, or none.", "NAMES"
        ),
    ] = "diffusers,cache-dit",
    quick: Annotated[
        bool,
        _option(PLAN, "--quick", f"A few cases with {QUICK_PROMPTS} prompts: minutes on two CPU cores."),
    ] = False,
    repeats: Annotated[int, _option(PLAN, "--repeats", "Timed calls of each case, 3 if left out.", "N")] = 3,
    timed: Annotated[int, _option(PLAN, "--timed", "Prompts that are timed, 1 if left out.", "N")] = 1,
    batch: Annotated[
        int | None,
        _option(
            PLAN,
            "--batch",
            "Pictures drawn in one call where a cache decides for each by itself; 1 on a CPU and 8 elsewhere if left "
            "out. Timing is always of one picture.",
            "N",
        ),
    ] = None,
    workers: Annotated[
        int, _option(PLAN, "--workers", "Processes that draw, each with the model; timing is done alone.", "N")
    ] = 1,
    minutes: Annotated[
        float | None,
        _option(PLAN, "--minutes", "Begin nothing that would take longer than this; continue later.", "MINUTES"),
    ] = None,
    lpips: Annotated[
        bool, _option(PLAN, "--lpips", "LPIPS too, with the eval extra; its weights may have to be downloaded.")
    ] = False,
    negative_prompt: o.NegativePrompt = None,
    guidance: o.Guidance = None,
    height: o.Height = None,
    width: o.Width = None,
    num_frames: o.NumFrames = None,
    set_: o.Set = None,
    model: o.Model = None,
    hook_map: o.HookMapFile = None,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    require_gpu: o.RequireGpu = False,
    output: Annotated[
        Path,
        _option(o.FILES, "--output", "Folder of results, outputs/bench if left out; continued if there.", "FOLDER"),
    ] = Path("outputs/bench"),
) -> None:
    """Speed and quality of every cache against the pipeline without one.

    Each case has the same prompts, seeds, noise, dtype and scheduler as its baseline, and each table the free
    alternatives: fewer steps, and a coarser grid of sigmas. What is stored already is not measured again.
    """
    o.at_least_1({"--repeats": repeats, "--timed": timed, "--workers": workers, "--batch": batch, "--limit": limit})
    seed_numbers, arguments = read_seeds(seeds), o.scalars("--set", set_)
    wanted = read_peers(peers)
    from chitu_diffusion.bench.files import prompts_file

    prompt_lines = o.read_prompts(None, prompts_file(prompts or "flexcache"))[:limit]
    o.need_diffusers()
    from chitu_diffusion.bench.cases import default_cases, load_cases
    from chitu_diffusion.bench.flexcache_run import run
    from chitu_diffusion.bench.kinds import PEERS
    from chitu_diffusion.bench.plan import Plan
    from chitu_diffusion.bench.publish import publish
    from chitu_diffusion.runtime import DiffusionTask
    from chitu_diffusion.runtime.generator import with_defaults
    from chitu_diffusion.runtime.loading import pick_device

    chosen = [case for case in load_cases(cases or default_cases()) if case.kind not in PEERS or case.kind in wanted]
    if quick:
        chosen, prompt_lines, timed = [case for case in chosen if case.quick], prompt_lines[:QUICK_PROMPTS], 1
    if not chosen:
        raise UserError("no case is left to run; --quick takes those with quick: true, and --peers leaves others out")
    task = DiffusionTask(
        prompts=prompt_lines, negative_prompt=negative_prompt, guidance=guidance, height=height, width=width,
        num_frames=num_frames, arguments=arguments, model=model, hook_map=hook_map, dtype=dtype, device=device,
        require_gpu=require_gpu,
    )  # fmt: skip
    if batch is None:
        batch = 1 if pick_device(device, require_gpu) == "cpu" else 8
    plan = Plan(
        task=with_defaults(task), seeds=seed_numbers, cases=tuple(chosen), output=output, batch=batch, repeats=repeats,
        timed=min(timed, len(prompt_lines)), workers=workers, seconds=60 * minutes if minutes else float("inf"),
    )  # fmt: skip
    from rich.console import Console

    try:
        bench = run(plan, Console(stderr=True), lpips)
    except KeyboardInterrupt:
        say(f"interrupted; what was measured is in {output}, and the same command continues there")
        sys.exit(130)
    if bench.missing_seconds is not None:
        say(
            f"not all cases have been measured, and the next step, of about {bench.missing_seconds / 60:.1f} min, does not fit; "
            "the same command continues"
        )
    for path in publish([output], output):
        print(path)


def collect(
    folders: Annotated[
        list[Path], typer.Argument(help="Results folders, or flexcache.json files of former ones.", metavar="DIR…")
    ],
    output: Annotated[Path, _option(o.FILES, "--output", "Folder for one JSON file, tables and pictures.", "FOLDER")],
    ratio: Annotated[
        float, _option(o.FILES, "--ratio", "How much less compute the contact sheet's cases take; 2 if left out.", "X")
    ] = 2.0,
) -> None:
    """Put results of several runs together: at different times, on different machines, of different cases.

    Results with different baselines stay in tables of their own.
    """
    from chitu_diffusion.bench.publish import publish

    for path in publish(folders, output, ratio=ratio):
        print(path)


def read_seeds(text: str) -> tuple[int, ...]:
    """``0,1,2`` as numbers.

    Raises:
        UserError: one is no whole number from 0, or there twice.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words) or len(set(words)) < len(words):
        raise UserError(f"--seeds {text!r} is not a list of different whole numbers such as 0,1,2")
    return tuple(int(word) for word in words)


def read_peers(text: str) -> set[str]:
    """``diffusers,cache-dit`` as names.

    Raises:
        UserError: a name that is not known.
    """
    from chitu_hooks.errors import nearest

    known = {"diffusers", "cache-dit"}
    names = {word.strip() for word in text.split(",")} - {"none", ""}
    for name in sorted(names - known):
        raise UserError(f"--peers: no peer {name!r}{nearest(name, known)}")
    return names
