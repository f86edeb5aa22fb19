"""``chitu adapt``: write the hook map, page and test of a model that has none, or check the last of that work."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import options as o
from .group import UserError
from .inspect import ModelArgument

if TYPE_CHECKING:
    from rich.console import Console

    from chitu_diffusion.intake.adapt import Adapted

PROMPT = "a red apple on a blue background"


def adapt(
    model: ModelArgument = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            help="The family; diffusers' own folder name if left out.",
            metavar="NAME",
            rich_help_panel=o.FILES,
            show_default=False,
        ),
    ] = None,
    root: Annotated[
        str,
        typer.Option(
            "--root", help="Folder to write adapters/, refs/ and tests/ in.", metavar="FOLDER", rich_help_panel=o.FILES
        ),
    ] = ".",
    finish: Annotated[
        bool,
        typer.Option(
            "--finish",
            help="Write nothing; check what is to be committed, and print commits and validation commands.",
            rich_help_panel=o.FILES,
        ),
    ] = False,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    require_gpu: o.RequireGpu = False,
    prompt: o.Prompt = None,
    negative_prompt: o.NegativePrompt = None,
    guidance: o.Guidance = None,
    height: o.Height = None,
    width: o.Width = None,
    image: o.Image = None,
    mask: o.Mask = None,
    num_frames: o.NumFrames = None,
    set_: o.Set = None,
) -> None:
    """Write adapters/NAME.py, refs/NAME/ and a test for a pipeline that has no hook map.

    A folder and an id are loaded, and called with --prompt and two steps; a Python file is called by its own `call(pipe)`.
    What is written has passed: hooked equals unhooked at every site, and a trunk that should be skipped is skipped. A
    pipeline class has no weights to call it with; what is open then stands in the map, as comments. The exit code is 1
    where a check failed; nothing is written then.
    """  # fmt: skip
    if finish:
        if model is not None or name is not None:
            raise UserError("--finish looks at the whole working tree; leave MODEL and --name out")
        if not show_finish(Path(root)):
            raise typer.Exit(1)
        return
    if model is None:
        raise UserError("which model? give an id, a folder, a pipeline class or a Python file with build()")
    arguments = o.scalars("--set", set_)
    o.need_diffusers()
    from rich.console import Console

    from chitu_diffusion.intake.adapt import adapt_model
    from chitu_diffusion.runtime import DiffusionTask

    from .show import showing_notes

    task = DiffusionTask(
        prompts=(prompt if prompt is not None else PROMPT,), negative_prompt=negative_prompt, steps=2, guidance=guidance,
        height=height, width=width, image=image, mask=mask, num_frames=num_frames, arguments=arguments, dtype=dtype,
        device=device, require_gpu=require_gpu,
    )  # fmt: skip
    with showing_notes():
        adapted = adapt_model(model, Path(root), name, task)
    show(Console(), adapted)
    if not adapted.passed:
        raise typer.Exit(1)


def show(console: Console, adapted: Adapted) -> None:
    """What was checked, what was written, and what is left to do."""
    from .inspect import _say

    found = adapted.inspection
    for check in adapted.checks or ():
        _say(console, f"{'ok    ' if check.passed else 'FAILED'} {check}")
    if not adapted.passed:
        _say(console, "nothing was written; chitu inspect shows the sites and the draft of the map")
        return
    if adapted.checks is None:
        _say(
            console,
            "not called: there are no weights here; give a folder, an id, or a Python file with build() and call(pipe)",
        )
    for path, text in adapted.files.items():
        _say(console, f"{path} ({len(text.splitlines())} lines)")
    _say(console, f"gap: {found.gap.not_covered} of {sum(found.gap.lines.values())} lines not covered")
    for question in adapted.questions:
        _say(console, f"to fill in: {question}")
    name = found.hook_map.name
    _say(console, f"to add to refs/README.md: | {name} | [`adapters/{name}.py`](../adapters/{name}.py) |")


def show_finish(root: Path) -> bool:
    """The findings, commits and commands; whether nothing was found."""
    from rich.console import Console

    from chitu_diffusion.intake.finish import finish

    from .inspect import _say

    console = Console()
    findings, commits, commands = finish(root)
    for finding in findings:
        _say(console, f"{'FAILED' if finding.wrong else 'ok    '} {finding.name}")
        for line in finding.wrong:
            _say(console, f"         {line}")
    if commits:
        _say(console, "\ncommits, by domain:")
    for commit in commits:
        _say(console, f"  git add -- {shlex.join(commit.files)} && git commit -m {shlex.quote(commit.subject)}")
    _say(console, "\nvalidation, for the description of the change:" if commands else "\nnothing to validate")
    for command in commands:
        _say(console, f"  {command}")
    return not any(finding.wrong for finding in findings)
