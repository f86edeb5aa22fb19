"""Weights on disk: is every shard of every index there, as long as its header says, with the tensors that the index names?"""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chitu_hooks.errors import nearest

from .errors import IntakeError

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".msgpack")
PARTIAL = (".incomplete", ".part", ".tmp", ".aria2")
LFS = b"version https://git-lfs"
LONGEST_HEADER = 100 * 2**20
"""Bytes; the format's own limit."""


@dataclass(frozen=True)
class Weights:
    """One folder that holds weights."""

    folder: str
    """Below the folder that was checked."""
    files: int
    bytes: int
    tensors: int
    """In files whose header can be read."""
    indexed: bool
    """Whether an index names the shards."""


def verify_weights(folder: Path, how_to_fetch: str) -> list[Weights]:
    """Check every weight file below `folder` against its header and its index. No tensor is read.

    Args:
        folder: any folder; a diffusers pipeline, or upstream's own files.
        how_to_fetch: the command that fetches the weights.

    Raises:
        IntakeError: no folder, no weights, or a file that is missing, cut off, too long or a stand-in; the first is named.
    """
    if not folder.is_dir():
        beside = [p.name for p in folder.parent.iterdir()] if folder.parent.is_dir() else []
        raise IntakeError(
            f"--models-dir: no folder {str(folder)!r}{nearest(folder.name, beside)}; fetch it: {how_to_fetch}"
        )
    files = sorted(path for path in folder.rglob("*") if path.is_file() and ".git" not in path.parts)
    partial = [path for path in files if path.name.endswith(PARTIAL)]
    if partial:
        raise IntakeError(f"--models-dir: {_below(partial[0], folder)} is a part of a file; finish it: {how_to_fetch}")
    indices = [path for path in files if path.name.endswith(".index.json")]
    weights = [path for path in files if path.suffix in WEIGHTS]
    if not weights and not indices:
        raise IntakeError(f"--models-dir: there are no weights in {str(folder)!r}; fetch them: {how_to_fetch}")
    tensors = {path: _check_file(path, folder) for path in weights}
    for index in indices:
        _check_index(index, folder, tensors, how_to_fetch)
    by_folder: dict[Path, list[Path]] = {}
    for path in weights:
        by_folder.setdefault(path.parent, []).append(path)
    indexed = {index.parent for index in indices}
    return [
        Weights(
            folder=_below(part, folder),
            files=len(paths),
            bytes=sum(path.stat().st_size for path in paths),
            tensors=sum(len(tensors[path]) for path in paths),
            indexed=part in indexed,
        )
        for part, paths in sorted(by_folder.items())
    ]


def how_to_fetch(name: str, folder: Path, refs: Path) -> str:
    """The command that fetches the weights of `name`; the repository is the first that its page or upstream's guide names."""
    for page in (refs / name / "README.md", refs / name / "upstream/README.md"):
        if page.is_file():
            text = page.read_text(encoding="utf-8", errors="replace")
            found = re.search(
                r"huggingface\.co/((?!datasets/|spaces/|docs/|papers/|collections/)[\w.-]+/[\w.-]*\w)", text
            )
            if found:
                return f"hf download {found.group(1)} --local-dir {folder}"
    return f"hf download ORGANISATION/MODEL --local-dir {folder}"


def _check_file(path: Path, folder: Path) -> frozenset[str]:
    """Check one weight file; the names of its tensors, if its header can be read."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        head = stream.read(64)
    if not size:
        raise IntakeError(f"--models-dir: {_below(path, folder)} is empty; fetch it again")
    if head.startswith(LFS):
        raise IntakeError(
            f"--models-dir: {_below(path, folder)} is a Git LFS pointer, not the file; run git lfs pull there"
        )
    if path.suffix != ".safetensors":
        return frozenset()
    header, start = _header(path, folder, size)
    end = start
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            end = max(end, start + entry["data_offsets"][1])
        except (TypeError, KeyError, IndexError):
            raise IntakeError(f"--models-dir: the header of {_below(path, folder)} has no place for {name!r}") from None
    if size != end:
        which = "cut off" if size < end else "too long"
        raise IntakeError(
            f"--models-dir: {_below(path, folder)} is {which}: {size} bytes, and its header says {end}; fetch it again"
        )
    return frozenset(header) - {"__metadata__"}


def _header(path: Path, folder: Path, size: int) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and where its data starts."""
    broken = IntakeError(f"--models-dir: {_below(path, folder)} has no readable safetensors header; fetch it again")
    with path.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else LONGEST_HEADER + 1
        if length > min(LONGEST_HEADER, size - 8):
            raise broken
        try:
            header = json.loads(stream.read(length))
        except ValueError:
            raise broken from None
    if not isinstance(header, dict):
        raise broken
    return header, 8 + length


def _check_index(index: Path, folder: Path, tensors: dict[Path, frozenset[str]], fetch: str) -> None:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards: dict[str, set[str]] = {}
        for tensor, shard in weight_map.items():
            shards.setdefault(shard, set()).add(tensor)
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        raise IntakeError(f"--models-dir: {_below(index, folder)} is not a list of weight files") from None
    missing = sorted(shard for shard in shards if not (index.parent / shard).is_file())
    if missing:
        part = _below(index.parent, folder)
        raise IntakeError(
            f"--models-dir: {len(missing)} of {len(shards)} weight files of {part} are missing ({missing[0]} is the first); "
            f"fetch them: {fetch}"
        )
    for shard, names in shards.items():
        there = tensors.get(index.parent / shard)
        absent = sorted(names - there) if there else []
        if absent:
            raise IntakeError(
                f"--models-dir: {_below(index.parent / shard, folder)} lacks {len(absent)} of the {len(names)} tensors that its "
                f"index names ({absent[0]} is the first); index and shards are of different versions"
            )


def _below(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()
