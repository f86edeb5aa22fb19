"""``chitu env``: it names versions, devices and kernels with reasons, and survives broken packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from chitu_diffusion.attention import kernels
from chitu_diffusion.cli import env as module
from chitu_diffusion.cli.main import app

ROOT = Path(__file__).resolve().parent.parent


def env(path: Path | None = None) -> str:
    words = [sys.executable, "-m", "chitu_diffusion.cli.main", "env"]
    paths = os.pathsep.join(str(entry) for entry in (path, ROOT) if entry is not None)
    done = subprocess.run(
        words, env={**os.environ, "PYTHONPATH": paths, "COLUMNS": "200"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    return done.stdout


def test_versions_devices_and_kernels_with_reasons() -> None:
    text = env()
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.split()}
    assert rows["torch"] == [torch.__version__]
    assert "cpu" in rows and "import diffusers: works" in text
    for name, kernel in kernels().items():
        if name in rows:
            answer = " ".join(rows[name])
            assert f"{kernel.exactness} {'yes' if kernel.available() is None else 'no: '}" in answer, answer
    assert {"sdpa_math", "sdpa_cudnn"} <= set(rows)
    if not torch.cuda.is_available():
        assert "no: needs a CUDA device" in " ".join(rows["sdpa_cudnn"])


@pytest.mark.parametrize("package", ["diffusers", "torch"])
def test_a_broken_package_is_told_and_breaks_nothing(tmp_path: Path, package: str) -> None:
    (tmp_path / f"{package}.py").write_text("raise ImportError('cannot import name FlashAttention from flash_attn')")
    text = env(tmp_path)
    assert "import diffusers: FAILS: ImportError: cannot import name FlashAttention from flash_attn" in text
    assert "attention kernels: cannot be tried: ImportError: cannot import name FlashAttention" in text
    assert ("import torch: FAILS" in text) == (package == "torch")
    assert "python" in text


def test_a_package_that_kills_the_process_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KERNELS", "import os; os.abort()")
    monkeypatch.setattr(module, "DEVICES", "import sys; print('early'); sys.exit(3)")
    done = CliRunner().invoke(app, ["env"], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert "attention kernels: cannot be tried: exit code -6" in done.output
    assert "import torch: FAILS: exit code 3" in done.output


def test_the_line_of_a_chained_traceback() -> None:
    stderr = (
        "Traceback\n  File x\nImportError: inner\n\nThe above\n\nTraceback\nRuntimeError: Failed to import: inner\n"
    )
    assert module.error_line(stderr, 1) == "RuntimeError: Failed to import: inner"
    assert module.error_line("", 7) == "exit code 7"
