"""``chitu intake``: record a model's reference: upstream's code, its weights, and a run of its demo without any hook."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import options as o
from .group import UserError

REFERENCE = "Reference"


def intake(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="The family, as in refs/NAME and adapters/NAME.py.", show_default=False),
    ],
    upstream: Annotated[
        str | None,
        typer.Option(
            "--upstream",
            help="Repository to clone into refs/NAME/upstream, its newest commit only.",
            metavar="URL",
            rich_help_panel=REFERENCE,
            show_default=False,
        ),
    ] = None,
    models_dir: Annotated[
        str | None,
        typer.Option(
            "--models-dir",
            help="Folder of weights to verify: every shard of every index, its header and its size.",
            metavar="FOLDER",
            rich_help_panel=REFERENCE,
            show_default=False,
        ),
    ] = None,
    demo: Annotated[
        str | None,
        typer.Option(
            "--demo",
            help="Upstream's own demo, run in the clone; command, output files, device and seconds go to refs/NAME/demo.json.",
            metavar="COMMAND",
            rich_help_panel=REFERENCE,
            show_default=False,
        ),
    ] = None,
    require_gpu: o.RequireGpu = False,
    root: Annotated[
        str,
        typer.Option("--root", help="Folder that has refs/.", metavar="FOLDER", rich_help_panel=o.FILES),
    ] = ".",
) -> None:
    """Record the reference of a model family: clone upstream, verify weights, run the demo without any hook."""
    if upstream is None and models_dir is None and demo is None:
        raise UserError("there is nothing to record; give --upstream, --models-dir or --demo")
    from chitu_diffusion.intake import upstream as reference
    from chitu_diffusion.intake.weights import how_to_fetch, verify_weights

    refs = Path(root) / "refs"
    folder = refs / reference.check_name(name)
    device = _device(require_gpu) if require_gpu or demo is not None else "cpu"
    if models_dir is not None:
        models = Path(models_dir).expanduser()
        for weights in verify_weights(models, how_to_fetch(name, models, refs)):
            index = ", all shards of its index" if weights.indexed else ""
            size = f"{weights.bytes / 1e9:.2f} GB" if weights.bytes >= 1e7 else f"{weights.bytes} bytes"
            print(f"{models / weights.folder}: {weights.files} files, {size}, {weights.tensors} tensors{index}: whole")
    if upstream is not None:
        commit = reference.clone(upstream, folder / "upstream")
        print(f"{folder / 'upstream'}: {upstream} at {commit[:12]}")
    if demo is not None:
        data = reference.run_demo(demo, folder, folder / "upstream", device, require_gpu)
        print(f"{folder / 'demo.json'}: {data['seconds']} s on {device}, {len(data['outputs'])} output files")


def _device(require_gpu: bool) -> str:
    """The device that a demo finds here, by name."""
    o.need_diffusers()
    import torch

    from chitu_diffusion.runtime.loading import pick_device

    device = pick_device("auto", require_gpu)
    return torch.cuda.get_device_name() if device == "cuda" else device
