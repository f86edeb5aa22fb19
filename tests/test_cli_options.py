"""The options are frozen, ``--help`` is quick and true, and values are read as they are written."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from chitu_diffusion.cli import options
from chitu_diffusion.cli.group import UserError
from chitu_diffusion.cli.main import app

ROOT = Path(__file__).resolve().parent.parent

MODEL = ["--model", "--hook-map", "--dtype", "--device", "--require-gpu"]
FEATURES = ["--attention", "--cache", "--cache-arg"]
OPTIONS = {
    "run": [
        "--prompt", "--prompts", "--negative-prompt", "--steps", "--guidance", "--height", "--width", "--seed",
        "--num-images", "--image", "--mask", "--num-frames", "--fps", "--set", *MODEL, *FEATURES, "--nproc",
        "--cfg-parallel", "--ulysses", "--ring", "--gather", "--overlap", "--encode-prompt", "--output",
    ],
    "verify": [
        *MODEL, "--prompt", "--negative-prompt", "--steps", "--guidance", "--height", "--width", "--seed", "--image",
        "--mask", "--num-frames", "--set", *FEATURES,
    ],
    "inspect": ["--hook-map", "--json", "--write"],
    "intake": ["--upstream", "--models-dir", "--demo", "--require-gpu", "--root"],
    "adapt": [
        "--name", "--root", "--finish", "--dtype", "--device", "--require-gpu", "--prompt", "--negative-prompt",
        "--guidance", "--height", "--width", "--image", "--mask", "--num-frames", "--set",
    ],
    "calibrate": [
        "--output", "--planned", "--prompt", "--prompts", "--negative-prompt", "--steps", "--guidance", "--height", "--width",
        "--seed", "--num-frames", "--set", *MODEL,
    ],
    "env": [],
}  # fmt: skip


def commands() -> dict[str, Any]:
    return typer.main.get_command(app).commands  # type: ignore[attr-defined]


def test_the_options_are_frozen() -> None:
    found = {
        name: [option for parameter in command.params for option in parameter.opts if option.startswith("-")]
        for name, command in commands().items()
    }
    assert set(OPTIONS) <= set(found)
    assert {name: found[name] for name in OPTIONS} == OPTIONS


@pytest.mark.parametrize("command", OPTIONS)
def test_every_option_is_explained_in_a_panel(command: str) -> None:
    for parameter in commands()[command].params:
        assert parameter.help, parameter.name
        if parameter.opts[0].startswith("-"):
            assert parameter.rich_help_panel, parameter.name
    done = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "160"})
    assert done.exit_code == 0
    for option in OPTIONS[command]:
        assert option in done.output


def test_nothing_heavy_is_imported_for_help() -> None:
    code = (
        "import sys; sys.argv = ['chitu', 'run', '--help']\n"
        "from chitu_diffusion.cli.main import main\n"
        "try: main()\nexcept SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'diffusers', 'transformers', 'numpy', 'PIL'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)


def test_the_version_and_the_bare_command() -> None:
    from chitu_diffusion import __version__

    assert CliRunner().invoke(app, ["--version"]).output.split() == ["chitu", __version__]
    bare = CliRunner().invoke(app, [])
    assert "run" in bare.output and "verify" in bare.output


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3), ("-2.5", -2.5), ("1e-3", 1e-3), ("true", True), ("null", None), ("word", "word"), ('"3"', "3"),
        ("two words", "two words"), ("[1.0, 0.5]", [1.0, 0.5]), ("a=b", "a=b"), ("", None),
    ],
)  # fmt: skip
def test_values(text: str, value: Any) -> None:
    found = options.scalars("--set", [f"key={text}"])["key"]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("text", ["{a: 1}", "[[1]]", "[1, {a: 2}]", "2020-01-01", "[1,"])
def test_values_that_are_not_plain(text: str) -> None:
    with pytest.raises(UserError, match="--set key="):
        options.scalars("--set", [f"key={text}"])


def test_the_options_are_those_of_the_task() -> None:
    """Each option of ``chitu run`` becomes a field of the task, and the other way round."""
    from dataclasses import fields

    from chitu_diffusion.cli.run import run
    from chitu_diffusion.runtime import DiffusionTask

    renamed = {"prompt": "prompts", "set_": "arguments", "cache_arg": "cache_args"}
    taken = {renamed.get(name, name) for name in inspect.signature(run).parameters}
    assert taken == {field.name for field in fields(DiffusionTask)}
