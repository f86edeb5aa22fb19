"""The results folder: one file for each case, found again by what it is a result of.

::

    bench.json           format of the folder
    baselines/ID.json    what every picture of a group is compared with: model, prompts, seeds, machine, versions
    cases/ID.json        one case against one baseline
    pictures/ID/         the first pictures, for the contact sheet
    tensors/             pictures and latents of the baselines, so that an interrupted bench continues
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from chitu_hooks import feature

from .errors import BenchError
from .files import read_json, write_json, write_whole
from .quality import Drawn

FORMAT = 1
KINDS = ("flexcache", "parallel")
"""What a folder holds results of."""


def content_id(content: Any) -> str:
    """A short name for plain data: the same for the same content."""
    text = json.dumps(content, sort_keys=True, default=list)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def code_digest(*packages: str) -> str:
    """Of the engine's source and that of the named packages of ours: a case is measured again when they change."""
    package = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for folder in (Path(feature.__file__).parent, *(package / name for name in packages)):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.relative_to(folder.parent).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def model_digest(folder: Path) -> str:
    """Of a model's folder: every configuration, and size, first and last megabyte of every other file."""
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder).as_posix()} {size}".encode())
        with path.open("rb") as stream:
            digest.update(stream.read(2**20))
            stream.seek(max(size - 2**20, 0))
            digest.update(stream.read())
    return digest.hexdigest()[:16]


class Results:
    """A folder of results of this format.

    Args:
        kind: one of `KINDS`.

    Raises:
        BenchError: `folder` holds something else, results of another format, or cannot be written.
    """

    def __init__(self, folder: Path, kind: str = "flexcache") -> None:
        self.folder = folder
        if folder.exists() and not folder.is_dir():
            raise BenchError(f"--output {str(folder)!r} is a file, not a folder of results")
        marker = folder / "bench.json"
        if marker.exists():
            found = check_format(marker)["bench"]
            if found != kind:
                raise BenchError(
                    f"--output {str(folder)!r} holds results of the bench {found!r}; give another for {kind!r}"
                )
        elif folder.exists() and any(folder.iterdir()):
            raise BenchError(f"--output {str(folder)!r} is no folder of results, and not empty; give another")
        else:
            write_json(marker, {"format": FORMAT, "bench": kind})

    def case(self, name: str) -> dict[str, Any] | None:
        """The stored record of that id; half a one is none."""
        path = self.folder / "cases" / f"{name}.json"
        return read_json(path) if path.is_file() else None

    def put_case(self, record: dict[str, Any]) -> None:
        write_json(self.folder / "cases" / f"{record['id']}.json", record)

    def baseline(self, name: str) -> dict[str, Any] | None:
        path = self.folder / "baselines" / f"{name}.json"
        return read_json(path) if path.is_file() else None

    def put_baseline(self, record: dict[str, Any]) -> None:
        write_json(self.folder / "baselines" / f"{record['id']}.json", record)

    def put_pictures(self, name: str, pictures: torch.Tensor) -> None:
        """Store pictures of one id, (N, H, W, 3) floats from 0 to 1; of clips the middle frame."""
        from PIL import Image

        frames = pictures[:, pictures.shape[1] // 2] if pictures.ndim == 5 else pictures
        for number, frame in enumerate((frames * 255).round().to(torch.uint8).numpy()):
            path = self.folder / "pictures" / name / f"{number:02d}.png"
            picture = Image.fromarray(frame)
            write_whole(path, lambda half, picture=picture: picture.save(half, format="PNG"))  # type: ignore[misc]

    def put_drawn(self, name: str, drawn: Drawn) -> None:
        """Store what a baseline drew, for the cases that are still to come."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        tensors = {"pictures": drawn.pictures.contiguous()}
        if drawn.latents is not None:
            tensors["latents"] = drawn.latents.contiguous()

        def save(half: Path) -> None:
            try:
                save_file(tensors, half)
            except SafetensorError as error:  # what an OSError becomes in there
                raise OSError(str(error)) from error

        write_whole(self.folder / "tensors" / f"{name}.safetensors", save)

    def drop_parts(self, name: str) -> None:
        """Remove the parts in which `name` was drawn, also those that an interrupted bench left."""
        for path in (self.folder / "tensors").glob(f"{name}-from-*.safetensors"):
            path.unlink(missing_ok=True)

    def has_drawn(self, name: str) -> bool:
        return (self.folder / "tensors" / f"{name}.safetensors").is_file()

    def drawn(self, name: str) -> Drawn | None:
        """What `put_drawn` stored under that name."""
        from safetensors.torch import load_file

        path = self.folder / "tensors" / f"{name}.safetensors"
        if not path.is_file():
            return None
        tensors = load_file(path)
        return Drawn(tensors["pictures"], tensors.get("latents"))


def check_format(path: Path) -> Any:
    """What is in `path`, a file with a ``format``.

    Raises:
        BenchError: it is of another format, or of none.
    """
    data = read_json(path)
    found = data.get("format") if isinstance(data, dict) else None
    if found != FORMAT or data.get("bench") not in KINDS:
        raise BenchError(
            f"{str(path)!r} is of another version: it has format {found!r} of {data.get('bench') if found else None!r}, and "
            f"this version reads format {FORMAT} of {' and '.join(KINDS)}; write to another folder, and nothing in it is touched"
        )
    return data


def kind_of(place: Path) -> str:
    """Of which bench a folder, or a file that `chitu bench collect` wrote, holds results.

    Raises:
        BenchError: it holds none, or those of another version.
    """
    if not place.is_file() and not (place / "bench.json").is_file():
        raise BenchError(f"{str(place)!r} holds no results of a bench")
    return check_format(place if place.is_file() else place / "bench.json")["bench"]


def summary(places: Iterable[Path]) -> dict[str, Any]:
    """Results of several folders, or of files that `chitu bench collect` wrote, as one piece of plain data; all of one bench.

    Cases stay with the baseline that they were measured against: runs on different machines, versions, prompts or
    models have different baselines and are never put into one table. Of a case that was measured several times
    against the same baseline, the one with most in it counts, then the newest.

    Raises:
        BenchError: a place holds no results, or those of another version.
    """
    baselines: dict[str, Any] = {}
    cases: dict[str, Any] = {}
    places = list(places)
    kinds = {kind_of(place) for place in places}
    if len(kinds) != 1:
        raise BenchError(f"results of {' and '.join(sorted(kinds)) or 'no bench'} are not put together")
    for place in places:
        for record in _records(place, "baselines"):
            _keep(baselines, record)
        for record in _records(place, "cases"):
            _keep(cases, record)
    for record in cases.values():
        if record["baseline"] not in baselines:
            raise BenchError(f"case {record['id']} has no baseline {record['baseline']} in what was collected")
    return {
        "format": FORMAT,
        "bench": kinds.pop(),
        "baselines": sorted(baselines.values(), key=lambda b: (b["content"]["steps"], b["time"], b["id"])),
        "cases": sorted(cases.values(), key=lambda c: (c["baseline"], c["number"], c["id"])),
    }


def _records(place: Path, what: str) -> Iterator[dict[str, Any]]:
    if place.is_file():
        yield from check_format(place)[what]
        return
    for path in sorted((place / what).glob("*.json")):
        record = read_json(path)
        quality = record.get("quality")
        if quality:
            record["quality"] = {key: value for key, value in quality.items() if key != "samples"}
        yield record


def _keep(found: dict[str, Any], record: dict[str, Any]) -> None:
    """Put `record` in, unless a better one of the same id is there."""

    def worth(one: dict[str, Any]) -> tuple[Any, ...]:
        return one.get("error") is None, bool(one.get("quality")) + bool(one.get("timing")), one["time"]

    before = found.get(record["id"])
    if before is None or worth(record) > worth(before):
        found[record["id"]] = record
