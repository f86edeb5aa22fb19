"""Ctrl-C and the end that a scheduler asks for arrive, whatever runs at that moment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SWALLOWED = """
import os, signal, sys, time
from chitu_diffusion.cli.interrupt import keep_interrupts

class Dropped:
    def __del__(self):
        os.kill(os.getpid(), signal.{name})
        time.sleep(0.01)

if {kept}:
    keep_interrupts()
try:
    Dropped()
    time.sleep({wait})
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize("name, code", [("SIGINT", 130), ("SIGTERM", 143)])
def test_what_a_destructor_swallows_comes_again(name: str, code: int) -> None:
    done = python(SWALLOWED.format(name=name, kept=True, wait=60))
    assert (done.returncode, done.stderr) == (code, "")


def test_python_by_itself_loses_it() -> None:
    done = python(SWALLOWED.format(name="SIGINT", kept=False, wait=0))
    assert done.returncode == 0 and "Exception ignored" in done.stderr


def test_other_errors_in_destructors_are_told_as_before() -> None:
    done = python(
        "from chitu_diffusion.cli.interrupt import keep_interrupts\nkeep_interrupts()\n"
        "class Broken:\n    def __del__(self):\n        raise ValueError('told')\nBroken()\n"
    )
    assert done.returncode == 0 and "ValueError: told" in done.stderr


def python(program: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=environment)
