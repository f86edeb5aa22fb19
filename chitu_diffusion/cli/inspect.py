"""``chitu inspect``: the sites of a model, the map in use, and what the seams do not reach of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import options as o
from .group import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from chitu_diffusion.intake.inspection import Inspection

ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL]",
        help="Hub id, folder, diffusers pipeline class, Python file with build(), or a profile of the planned cache; the "
        "embedded model if left out.",
        show_default=False,
    ),
]


def inspect(
    model: ModelArgument = None,
    hook_map: o.HookMapFile = None,
    json_: Annotated[bool, typer.Option("--json", help="Print everything as JSON.", rich_help_panel=o.FILES)] = False,
    write: Annotated[
        str | None,
        typer.Option(
            "--write",
            help="Write the gap report as Markdown, such as refs/NAME/gap.md; the file must not exist yet.",
            metavar="FILE",
            rich_help_panel=o.FILES,
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show the sites of a pipeline, the hook map in use, and the gap report.

    Weights are neither needed nor loaded: a class and a folder are read on torch's meta device, an id fetches
    configurations only. A Python file has `build()`, which returns a pipeline, and may have `call(pipe)`, one small call
    of it: then what an inferred map says is seen in that call and not read from the source.
    """
    if model is not None and model.endswith(".safetensors"):
        if write is not None or hook_map is not None:
            option = "--hook-map" if write is None else "--write"
            raise UserError(f"{option} is for a model, and {model!r} is a profile of the planned cache; leave it out")
        _show_profile(model, json_)
        return
    if write is not None and Path(write).exists():
        raise UserError(f"--write {write!r} exists already and is never overwritten; delete it first")
    o.need_diffusers()
    from rich.console import Console

    from chitu_diffusion.intake.inspection import inspect_model
    from chitu_diffusion.intake.upstream import write_new

    from .show import showing_notes

    with showing_notes():
        found = inspect_model(model, hook_map)
    if write is not None:
        write_new(Path(write), found.gap.to_markdown())
    if json_:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        show(Console(), found)


def _show_profile(path: str, as_json: bool) -> None:
    """What the profile in the file `path` foretells."""
    from chitu_diffusion.flexcache import Profile
    from chitu_diffusion.flexcache.planning.tell import told

    from .calibrate import show_plans

    found = told(Profile.load(path))
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        show_plans(found)


def show(console: Console, found: Inspection) -> None:
    """The tables of `found`, and the draft of a map where there is none."""
    from .show import table

    sites = table("site", "kind", "count", "class", numbers=("count",))
    for row in found.rows():
        path = row["site"].partition(".")[2]
        sites.add_row(f"  {path}" if path else row["site"], row["kind"], str(row["count"]), row["what"])
        if row["note"]:
            sites.add_row("", "", "", row["note"])
    sites.columns[-1].overflow = "fold"
    name = type(found.target.pipe).__name__
    how = "" if found.draft is None else ", seen in a call" if found.seen else ", read from the source"
    _say(console, f"{name}: hook map {found.hook_map.name!r} ({found.hook_map.source}{how})")
    console.print(sites)
    console.print()
    show_gap(console, found)
    if found.map_text is not None:
        _say(console, f"\nThe map, as it could stand in adapters/{found.hook_map.name}.py:\n")
        _say(console, found.map_text)


def show_gap(console: Console, found: Inspection) -> None:
    """Lines per class, and the pieces that are not covered."""
    from chitu_diffusion.intake.gap import CLASSES, NOT_COVERED

    from .show import table

    gap = found.gap
    made = table("gap report", "pieces", "lines of code", numbers=("pieces", "lines of code"))
    for kind in CLASSES:
        made.add_row(kind, str(len(gap.of(kind))), str(gap.lines[kind]))
    console.print(made)
    total = sum(gap.lines.values())
    _say(console, f"not covered: {gap.not_covered} of {total} lines, in diffusers {gap.diffusers}")
    for piece in gap.of(*NOT_COVERED):
        _say(console, f"  {piece.kind}: {piece.name} ({piece.lines} lines, {piece.where}): {piece.why}")


def _say(console: Console, text: str) -> None:
    """A sentence, not broken at the edge of a narrow terminal."""
    console.print(text, soft_wrap=True, markup=False, highlight=False)
