"""Entry point of ``chitu``: the subcommands, put together."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from .adapt import adapt
from .bench import register
from .calibrate import calibrate
from .env import env
from .group import Group, is_rank
from .inspect import inspect
from .intake import intake
from .interrupt import keep_interrupts
from .run import run
from .verify import verify

app = typer.Typer(
    name="chitu",
    cls=Group,
    help="Run diffusers pipelines with hooks that make them faster, and check that the hooks do what they say.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(run)
app.command()(verify)
app.command()(inspect)
app.command()(intake)
app.command()(adapt)
app.command()(calibrate)
app.command()(env)
register(app)


def _version(wanted: bool) -> None:
    if wanted:
        from chitu_diffusion import __version__

        print(f"chitu {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Run diffusers pipelines with hooks that make them faster, and check that the hooks do what they say."""


def main() -> None:
    """What the ``chitu`` script calls."""
    # The library tells of optional parts that it does without; a user who wants to know sets this variable.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    keep_interrupts()
    if is_rank():
        from chitu_diffusion.parallel.launch import end_with_launcher

        end_with_launcher()
    app()


if __name__ == "__main__":
    main()
