"""The example in docs/new-strategy.md runs as it stands, and is short."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import build, call_arguments, run

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.filterwarnings("ignore::chitu_hooks.ChituWarning")
@pytest.mark.parametrize("name", ["flux", "wan"])
def test_the_example_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/new-strategy.md").read_text(), re.M | re.S)
    strategy = example[example.index("class DriftStrategy") : example.index("with patch")].strip()
    assert len([line for line in strategy.splitlines() if line.strip()]) <= 10
    pipe = build(name)
    stock = run(name, pipe, 10)
    space: dict[str, Any] = {"pipe": pipe, "arguments": call_arguments(name, 10), "__name__": "example"}
    exec(compile(example, "new-strategy.md", "exec", dont_inherit=True), space)
    (feature,) = space["handle"].report().features
    assert feature["name"] == "drift" and feature["hits"] > 0 and feature["batch_coupled"]
    assert "drift (lossy)" in capsys.readouterr().out
    assert not torch.equal(next(iter(space["image"].values())), stock)
    assert torch.equal(run(name, pipe, 10), stock)
