"""The output folder: made in one move, never on top of another, never half written."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import OutputError
from .generator import Item, Result


def default_folder(prompt: str, root: Path | None = None) -> Path:
    """A new folder below `root` (``outputs``), named after the time and the prompt."""
    slug = re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:40].strip("-")
    name = "-".join(part for part in (time.strftime("%Y%m%d-%H%M%S"), slug) if part)
    root = root if root is not None else Path("outputs")
    return free_name(root / name)


def free_name(folder: Path) -> Path:
    """`folder`, or the first of ``folder-2``, ``folder-3``… that does not exist."""
    candidate, number = folder, 1
    while os.path.lexists(candidate):
        number += 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    return candidate


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder` that takes its name when the block ends well, and is removed when it does not.

    It is made at once, so that a place that cannot be written to is known before the work and not after it.

    Raises:
        OutputError: `folder` exists, or its parent cannot be written.
    """
    _check_absent(folder)
    made = _make_parents(folder.parent)
    try:
        try:
            temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", suffix=".part", dir=folder.parent))
        except OSError as error:
            raise OutputError(f"--output {str(folder)!r} cannot be written: {error.strerror}") from None
        try:
            yield temporary
            _check_absent(folder)
            temporary.chmod(0o777 & ~_umask())
            temporary.rename(folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    except BaseException:
        for parent in made:
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise


def _check_absent(folder: Path) -> None:
    if os.path.lexists(folder):
        raise OutputError(f"--output {str(folder)!r} exists and is never overwritten; free: {str(free_name(folder))!r}")


def _make_parents(parent: Path) -> list[Path]:
    """Make `parent`; the folders that had to be made, innermost first."""
    missing = []
    here = parent
    if parent.exists() and not parent.is_dir():
        raise OutputError(f"--output: {str(parent)!r} is a file, so there can be no folder in it")
    while not here.exists() and here != here.parent:
        missing.append(here)
        here = here.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        for made in missing:
            with contextlib.suppress(OSError):
                made.rmdir()
        raise OutputError(f"--output: {str(parent)!r} cannot be made: {error.strerror}") from None
    return missing


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_result(folder: Path, result: Result, request: dict[str, Any]) -> list[str]:
    """Write everything of `result` into `folder`, which exists and is empty.

    Args:
        folder: see `new_folder`.
        result: what was made.
        request: what ``request.json`` is to hold.

    Returns:
        The names of the pictures and clips.

    Raises:
        OutputError: the disk is full, or the like.
    """
    try:
        names = [_write_item(folder, number, item) for number, item in enumerate(result.items)]
        _write_json(folder / "request.json", request)
        files = [{"file": name, "prompt": item.prompt} for name, item in zip(names, result.items)]
        _write_json(folder / "report.json", {"files": files, "generations": result.reports})
        _write_json(folder / "metrics.json", result.metrics.to_json())
    except OSError as error:
        raise OutputError(f"--output: {str(folder.parent)!r} cannot be written: {error.strerror or error}") from error
    return names


def _write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False, default=str) + "\n", encoding="utf-8")


def _write_item(folder: Path, number: int, item: Item) -> str:
    if item.fps is None:
        name = f"picture-{number:03d}.png"
        item.frames[0].save(folder / name)
        return name
    if _has_mp4():
        from diffusers.utils import export_to_video

        name = f"clip-{number:03d}.mp4"
        export_to_video(item.frames, str(folder / name), fps=round(item.fps), macro_block_size=1)
        return name
    # Without ffmpeg: every frame as it is, in a file that browsers play.
    name = f"clip-{number:03d}.webp"
    first, *rest = item.frames
    duration = max(1, round(1000 / item.fps))
    first.save(folder / name, save_all=True, append_images=rest, duration=duration, loop=0, lossless=True)
    return name


def _has_mp4() -> bool:
    """Whether clips can be written as MP4; the ``video`` extra brings what is needed."""
    from importlib.util import find_spec

    return find_spec("imageio") is not None and find_spec("imageio_ffmpeg") is not None
