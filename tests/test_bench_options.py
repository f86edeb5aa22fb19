"""The options of ``chitu bench`` are frozen, and each is explained."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from chitu_diffusion.cli.bench_flexcache import read_peers, read_seeds
from chitu_diffusion.cli.group import UserError
from chitu_diffusion.cli.main import app

OPTIONS = {
    "attention": ["--write", "--output", "--quick"],
    "flexcache": [
        "--cases", "--prompts", "--limit", "--seeds", "--peers", "--quick", "--repeats", "--timed", "--batch", "--workers",
        "--minutes", "--lpips", "--negative-prompt", "--guidance", "--height", "--width", "--num-frames", "--set",
        "--model", "--hook-map", "--dtype", "--device", "--require-gpu", "--output",
    ],
    "parallel": [
        "--nproc", "--modes", "--peers", "--repeats", "--compile", "--attention", "--prompt", "--negative-prompt",
        "--steps", "--guidance", "--height", "--width", "--num-frames", "--seed", "--set", "--model", "--hook-map",
        "--dtype", "--device", "--require-gpu", "--output",
    ],
    "collect": ["--output", "--ratio"],
}  # fmt: skip


def commands() -> dict[str, Any]:
    return typer.main.get_command(app).commands["bench"].commands  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", OPTIONS)
def test_the_options_are_frozen_and_explained(name: str) -> None:
    parameters = commands()[name].params
    found = [option for parameter in parameters for option in parameter.opts if option.startswith("-")]
    assert found == OPTIONS[name]
    assert [parameter.name for parameter in parameters if not parameter.help] == []


def test_seeds_and_peers() -> None:
    assert read_seeds("0, 3,1") == (0, 3, 1)
    assert read_peers("none") == set() and read_peers("cache-dit, diffusers") == {"diffusers", "cache-dit"}
    for wrong in ("1,1", "-1", "a", ""):
        with pytest.raises(UserError, match="--seeds"):
            read_seeds(wrong)
    with pytest.raises(UserError, match="no peer 'cachedit'; nearest: cache-dit"):
        read_peers("cachedit")
