"""Files of the bench: where the shipped ones are, and writing that leaves whole files or none."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .errors import BenchError

HALF = ".part"
"""What the name of a file that is being written ends with, after its process's number."""


def data_folder() -> Path:
    """Shipped cases and prompts: inside the package in the wheel, `ChituBench/` beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    shipped = package / "_bench"
    return shipped if shipped.is_dir() else package.parent / "ChituBench"


def prompts_file(name: str) -> str:
    """The path of a list of prompts: `name` itself, unless there is no such file and a shipped list is called so."""
    shipped = data_folder() / "prompts" / f"{name}.txt"
    return name if Path(name).is_file() or not shipped.is_file() else str(shipped)


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` fill a file beside `path`, and move it there when it is whole.

    Raises:
        BenchError: it cannot be written, on a full disk for example. What was there before is still there.
    """
    half = path.with_name(f"{path.name}.{os.getpid()}{HALF}")  # several processes may write the same file
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(half)
        half.replace(path)
    except OSError as error:
        raise BenchError(
            f"{str(path)!r} cannot be written: {error.strerror or error}; what was stored before is kept, and the same "
            "command continues from there"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            half.unlink(missing_ok=True)


def drop_halves(folder: Path, process: int) -> None:
    """Remove what that process, which was ended, had not written to the end."""
    for half in folder.rglob(f"*.{process}{HALF}"):
        half.unlink(missing_ok=True)


def write_json(path: Path, data: Any) -> None:
    """Write `data` as JSON; raises what `write_whole` raises."""
    text = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    write_whole(path, lambda half: half.write_text(text, encoding="utf-8"))


def read_json(path: Path) -> Any:
    """What `write_json` wrote.

    Raises:
        BenchError: there is no such file, or it is no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BenchError(f"{str(path)!r} cannot be read: {' '.join(str(error).split())}") from None
