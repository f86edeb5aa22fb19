"""The reference as its authors publish it: a shallow clone of their code, and one run of their demo."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import IntakeError

NAME = re.compile(r"[a-z][a-z0-9_]*")
LICENCES = ("LICENSE", "LICENSE.md", "LICENSE.txt", "LICENCE", "COPYING")
LONGEST_LIST = 200
"""Output files that are recorded one by one."""


def check_name(name: str) -> str:
    """`name` if it can be the name of a family: of its adapter, its folder in ``refs/`` and its test."""
    if NAME.fullmatch(name) is None:
        raise IntakeError(f"{name!r} cannot name a family; use lower case letters, digits and _, such as hunyuan_video")
    return name


def clone(url: str, folder: Path) -> str:
    """Clone `url` into `folder`, its newest commit only. A clone of the same `url` that is there is kept as it is.

    Returns:
        The commit.

    Raises:
        IntakeError: `folder` is something else, there is no git, or the repository cannot be cloned. Nothing is left behind.
    """
    if (folder / ".git").exists() and _git(folder, "config", "remote.origin.url") == url:
        return _git(folder, "rev-parse", "HEAD")
    if os.path.lexists(folder):
        raise IntakeError(f"{str(folder)!r} exists already and is never overwritten; delete it to clone anew")
    if shutil.which("git") is None:
        raise IntakeError("--upstream needs git, and there is none on PATH")
    made = make_folder(folder.parent)
    temporary = Path(tempfile.mkdtemp(prefix=".upstream-", dir=folder.parent))
    try:
        options = {"GIT_TERMINAL_PROMPT": "0", "GIT_LFS_SKIP_SMUDGE": "1"}
        done = subprocess.run(
            ["git", "clone", "--quiet", "--depth", "1", "--", url, str(temporary / "upstream")],
            capture_output=True, text=True, env={**os.environ, **options}, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        if done.returncode:
            raise IntakeError(f"{url!r} cannot be cloned: {_last(done.stderr) or f'git ended with {done.returncode}'}")
        (temporary / "upstream").rename(folder)
    except BaseException:
        _unmake(temporary, made)
        raise
    shutil.rmtree(temporary, ignore_errors=True)
    return _git(folder, "rev-parse", "HEAD") or "unknown"


def clone_facts(folder: Path) -> Iterator[tuple[str, str, str]]:
    """(what, value, source) of a clone: repository, commit, licence; nothing if there is none."""
    if not (folder / ".git").exists():
        return
    url, commit = _git(folder, "config", "remote.origin.url"), _git(folder, "rev-parse", "HEAD")
    shown = url.removesuffix(".git")
    yield "official repository", f"<{shown}>" if shown.startswith("http") else f"`{shown}`", "the clone in `upstream/`"
    date = _git(folder, "log", "-1", "--format=%cs")
    yield "commit that was read", f"`{commit[:8]}` of {date}", "the clone in `upstream/`"
    for name in LICENCES:
        if (folder / name).is_file():
            text = (folder / name).read_text(encoding="utf-8", errors="replace")
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            yield "licence of the code", lines[0] if lines else "an empty file", f"first line of `upstream/{name}`"
            return


def run_demo(command: str, folder: Path, upstream: Path, device: str, require_gpu: bool) -> dict[str, Any]:
    """Run upstream's demo, with nothing of Chitu in it, and write ``demo.json``.

    Args:
        command: as one types it in the clone.
        folder: ``refs/<name>``.
        upstream: the clone; the demo runs there, or here if there is none.
        device: the device that torch has here.
        require_gpu: refuse a demo that left the GPU's memory as it was.

    Raises:
        IntakeError: ``demo.json`` exists, the command is not one or fails, or it did not use the GPU.
    """
    record = folder / "demo.json"
    if os.path.lexists(record):
        raise IntakeError(f"{str(record)!r} exists already and is never overwritten; delete it to run the demo anew")
    place = upstream if upstream.is_dir() else Path.cwd()
    before = _files(place)
    started = time.perf_counter()
    peak = _run(command, place)
    seconds = time.perf_counter() - started
    if require_gpu and not peak:
        raise IntakeError("--require-gpu: the demo ended well and used no memory of the GPU; it ran on the CPU")
    outputs = sorted(name for name, stamp in _files(place).items() if before.get(name) != stamp)
    data = {
        "command": command,
        "folder": "upstream" if place == upstream else str(place.name),
        "commit": _git(upstream, "rev-parse", "HEAD") if upstream.is_dir() else None,
        "device": device,
        "gpu_memory_peak_bytes": peak,
        "seconds": round(seconds, 2),
        "outputs": [_output(place / name, name) for name in outputs[:LONGEST_LIST]],
        "outputs_not_listed": max(0, len(outputs) - LONGEST_LIST),
        "python": platform.python_version(),
    }
    write_new(record, json.dumps(data, indent=2) + "\n")
    return data


def _run(command: str, place: Path) -> int:
    """Run `command` in `place`; the most bytes of GPU memory beyond those in use before, 0 without a GPU."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise IntakeError(f"--demo {command!r} is no command: {error}") from None
    if not words:
        raise IntakeError("--demo is empty; give the command that upstream's own guide types")
    base = _gpu_bytes()
    peak, running = base, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not running.wait(0.5):
            peak = max(peak, _gpu_bytes())

    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        try:
            process = subprocess.Popen(words, cwd=place, stdin=subprocess.DEVNULL, stderr=errors)
        except OSError as error:
            raise IntakeError(f"--demo: {words[0]!r} cannot be started in {str(place)!r}: {error.strerror}") from None
        watcher = threading.Thread(target=watch, daemon=True)
        if shutil.which("nvidia-smi"):
            watcher.start()
        try:
            code = process.wait()
        except BaseException:
            process.kill()
            process.wait()
            raise
        finally:
            running.set()
        errors.seek(0)
        if code:
            raise IntakeError(
                f"the demo ended with {code}: {_last(errors.read()) or 'it printed no error'}; nothing was recorded"
            )
    if watcher.is_alive():
        watcher.join()
    return peak - base


def _gpu_bytes() -> int:
    """Bytes in use on all GPUs, as their driver says; 0 without one."""
    if shutil.which("nvidia-smi") is None:
        return 0
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True)
    return sum(int(line) for line in done.stdout.split() if line.isdigit()) * 2**20 if done.returncode == 0 else 0


def _files(folder: Path) -> dict[str, tuple[int, int]]:
    """Path below `folder` -> size and time of every file; what git and Python keep for themselves is left out."""
    found = {}
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in (".git", "__pycache__", ".venv", "node_modules")]
        for name in names:
            path = Path(root, name)
            if not path.is_symlink():
                stat = path.stat()
                found[path.relative_to(folder).as_posix()] = (stat.st_size, stat.st_mtime_ns)
    return found


def _output(path: Path, name: str) -> dict[str, Any]:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return {"file": name, "bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("fatal: ") if lines else ""


def make_folder(folder: Path) -> list[Path]:
    """Make `folder`; what had to be made, innermost first."""
    missing = []
    here = folder
    while not here.exists():
        missing.append(here)
        here = here.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise IntakeError(f"{str(folder)!r} cannot be made: {error.strerror}") from None
    return missing


def _unmake(temporary: Path, made: list[Path]) -> None:
    shutil.rmtree(temporary, ignore_errors=True)
    for folder in made:
        try:
            folder.rmdir()
        except OSError:
            return


def write_new(path: Path, text: str) -> None:
    """Write a new file in one move."""
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.part")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.rename(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise IntakeError(f"{str(path)!r} cannot be written: {error.strerror}") from None
