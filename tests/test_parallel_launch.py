"""``chitu run`` on several ranks of this machine: the same picture, one message when it fails, and no process left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_text
from PIL import Image

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

ROOT = Path(__file__).resolve().parent.parent

MAP = """
import os, pathlib, signal, threading, time
exec(pathlib.Path({adapter!r}).read_text())
pathlib.Path({folder!r}, f"pid-{{os.getpid()}}").write_text(os.environ.get("RANK", ""))
def later(how):
    while not pathlib.Path({folder!r}, "now").exists():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL) if how == "kill" else os._exit(3)
how = os.environ.get("TEST_HOW", "")
if os.environ.get("RANK") == "1" and how in ("kill", "exit"):
    threading.Thread(target=later, args=(how,), daemon=True).start()
if os.environ.get("RANK") == "1" and how == "raise":
    raise RuntimeError("not today")
"""
"""A hook map that notes the process it is read in, and ends that of rank 1 when told to."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_text.save("sd3", tmp_path_factory.mktemp("models") / "sd3")


class Running:
    """A launched ``chitu run``."""

    def __init__(self, model: Path, folder: Path, *words: str, how: str = "") -> None:
        self.folder = folder
        self.out = folder / "out"
        hook_map = folder / "map.py"
        hook_map.write_text(MAP.format(adapter=str(ROOT / "adapters/sd3.py"), folder=str(folder)))
        command = [
            "run",
            "--model",
            str(model),
            *tiny_text.SIZES["sd3"],
            "--prompt",
            "a cat",
            "--hook-map",
            str(hook_map),
        ]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "chitu_diffusion.cli.main", *command, "--output", str(self.out), *words],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TEST_HOW": how},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for_ranks(self, count: int) -> None:
        """Until every rank has read its hook map, and a bit more, so that steps run."""
        until = time.monotonic() + 400  # imports alone take a minute where others use the machine too
        while len(self.pids()) < count and time.monotonic() < until and self.process.poll() is None:
            time.sleep(0.1)
        time.sleep(3)
        assert self.process.poll() is None, self.process.communicate()
        assert len(self.pids()) == count

    def pids(self) -> list[int]:
        found = [path for path in self.folder.glob("pid-*") if path.read_text()]
        return [int(path.name.removeprefix("pid-")) for path in found]

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=400)
        return self.process.returncode, out, err

    def nothing_is_left(self) -> None:
        assert not [pid for pid in self.pids() if runs(pid)]
        assert not self.out.exists() and not list(self.folder.glob(".out*"))


def runs(pid: int) -> bool:
    """Whether there is such a process. One that has ended, and that nobody has asked how, is listed still."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] not in "ZX"


def patience() -> float:
    """Seconds within which a run ends whose rank has died: 20, and more where others wait for the processors too."""
    return 20 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def test_two_launches_side_by_side_give_the_picture_of_one_process(model: Path, tmp_path: Path) -> None:
    runs: dict[str, Any] = {}
    for name, words in {"alone": [], "ulysses": ["--ulysses", "2"], "auto": ["--nproc", "2"]}.items():
        (tmp_path / name).mkdir()
        runs[name] = Running(model, tmp_path / name, "--steps", "3", *words)
    pictures = {}
    for name, one in runs.items():
        code, out, err = one.end()
        assert code == 0, err
        assert out.count("picture-000.png") == 1, "one rank prints"
        assert sorted(path.name for path in one.out.iterdir()) == [
            "metrics.json", "picture-000.png", "report.json", "request.json",
        ]  # fmt: skip
        pictures[name] = np.asarray(Image.open(one.out / "picture-000.png")).astype(int)
    features = {
        name: {f["name"]: f for f in json.loads((one.out / "report.json").read_text())["generations"][0]["features"]}
        for name, one in runs.items()
    }
    assert features["ulysses"]["context parallel"]["calls spread"] == 3
    assert features["auto"]["cfg parallel"]["calls split"] == 3, "guidance first"
    assert pictures["alone"].std() > 0
    for name in ("ulysses", "auto"):
        assert np.abs(pictures[name] - pictures["alone"]).max() <= 1


@pytest.mark.parametrize(
    ("how", "message", "code"),
    [
        ("kill", "chitu: rank 1 was killed by SIGKILL", 1),
        ("exit", "chitu: rank 1 ended with exit code 3", 1),
        ("raise", "RuntimeError: not today", 2),
    ],
)
def test_a_rank_that_dies_ends_the_run(model: Path, tmp_path: Path, how: str, message: str, code: int) -> None:
    running = Running(model, tmp_path, "--steps", "100000", "--ulysses", "2", how=how)
    if how != "raise":
        running.wait_for_ranks(2)
        (tmp_path / "now").touch()
    started = time.monotonic()
    found, _, err = running.end()
    if how != "raise":
        assert time.monotonic() - started < patience()
    assert found == code
    assert len(err.strip().splitlines()) == 1 and message in err, err
    running.nothing_is_left()


def test_an_interrupt_ends_every_rank(model: Path, tmp_path: Path) -> None:
    running = Running(model, tmp_path, "--steps", "100000", "--gather", "2")
    running.wait_for_ranks(2)
    started = time.monotonic()
    running.process.send_signal(signal.SIGINT)
    code, _, err = running.end()
    assert time.monotonic() - started < patience()
    assert code == 130 and err.strip() == "chitu: interrupted; nothing was written"
    running.nothing_is_left()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--nproc", "2", "--ulysses", "3"), "2 processes cannot be divided into groups of 3"),
        (("--ulysses", "3"), "has 4 heads, which ulysses=3 does not divide; degrees that fit: 1, 2, 4"),
        (("--ulysses", "0"), "--ulysses 0 is not possible"),
    ],
)
def test_mistakes(model: Path, tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    running = Running(model, tmp_path, "--steps", "2", *words)
    code, _, err = running.end()
    assert code == 2 and len(err.strip().splitlines()) == 1 and message in err, err
    running.nothing_is_left()
