"""Profiles for the tests of the planned cache: calls that they do not draw, and a calibration of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from caches import STEPS
from tiny import build, call_arguments

from chitu_diffusion import patch

PROMPTS = 4


def calls(name: str, steps: int = STEPS, **over: Any) -> list[dict[str, Any]]:
    """Prompts and noise that the tests do not draw."""
    shape = {"output_type": "np"} if name != "flux latents" else {}
    name = name.split()[0]
    return [{**call_arguments(name, steps, seed=50 + n, prompt=50 + n, **over), **shape} for n in range(PROMPTS)]


def calibrated(name: str, path: Path, steps: int = STEPS, **over: Any) -> dict[str, Any]:
    with patch(build(name.split()[0])) as handle:
        return handle.calibrate(calls(name, steps, **over), planned=path)["planned"]
