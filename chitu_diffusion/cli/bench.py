"""``chitu bench``: measure on this machine what choices depend on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .bench_flexcache import collect, flexcache
from .bench_parallel import parallel

bench_app = typer.Typer(no_args_is_help=True, help="Measure on this machine what choices depend on.")


@bench_app.callback()
def bench() -> None:
    """Measure on this machine what choices depend on."""


bench_app.command()(flexcache)
bench_app.command()(parallel)
bench_app.command()(collect)


@bench_app.command()
def attention(
    write: Annotated[
        bool,
        typer.Option(
            "--write",
            help="Measure every head dim and length bucket too, and write the table that `--attention auto` chooses by, "
            "for this device's compute capability.",
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", metavar="FOLDER", help="Store the numbers and their pictures here.", show_default=False
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds, and the table in bfloat16 only.")] = False,
) -> None:
    """TFLOP/s of every attention kernel that this machine can use, at the shapes of well-known models.

    On a machine without a CUDA device the shapes are tiny: that shows that it works, and says nothing about speed.
    """
    import torch

    from chitu_diffusion.bench.attention import bench_attention
    from chitu_diffusion.bench.attention_plot import plot

    tiny = not torch.cuda.is_available()
    if tiny:
        print("no CUDA device: tiny shapes on the CPU, and the table is not written")
    result = bench_attention(output, write=write, quick=quick, tiny=tiny)
    for name, reason in result["unusable"].items():
        if not name.startswith("diffusers:"):
            print(f"not measured: {name} {reason}")
    if output is not None:
        for path in (output / "attention.json", *plot(output / "attention.json", output)):
            print(path)


def register(app: typer.Typer) -> None:
    """Put the group into the command."""
    app.add_typer(bench_app, name="bench")
