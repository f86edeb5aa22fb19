"""Loading a pipeline from a folder or an id, with everything that is commonly wrong with one told in one sentence."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from chitu_hooks.errors import nearest

from .errors import LoadError

DTYPES = ("auto", "float32", "bfloat16", "float16")
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".msgpack")


def model_source(model: str | None) -> Path | str:
    """What ``from_pretrained`` is to be given: a checked folder, or an id of the Hub.

    Raises:
        LoadError: a folder that is not there, is not a pipeline, or is half downloaded.
    """
    if model is None:
        from chitu_diffusion.demo import model_folder

        folder = model_folder()
        if not folder.is_dir():
            raise LoadError(f"this installation has no embedded model ({folder} is missing); name another with --model")
        check_folder(folder)
        return folder
    path = Path(model).expanduser()
    if path.exists():
        check_folder(path)
        return path
    if _looks_like_id(model) and not path.parent.is_dir():
        return model
    beside = [str(path.parent / p.name) for p in path.parent.iterdir()] if path.parent.is_dir() else []
    raise LoadError(f"no model folder {model!r}{nearest(str(path), beside) if beside else ''}")


def _looks_like_id(model: str) -> bool:
    return re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model) is not None and not model.startswith(".")


def check_folder(folder: Path) -> None:
    """Check that `folder` holds a whole pipeline, without reading any weights.

    Raises:
        LoadError: it names the first file that is missing, empty, cut off or a stand-in for one in Git LFS.
    """
    if not folder.is_dir():
        raise LoadError(
            f"{str(folder)!r} is a file; --model takes a folder with a model_index.json, or an id of the Hub"
        )
    index = folder / "model_index.json"
    if not index.is_file():
        raise LoadError(f"{str(folder)!r} has no model_index.json, so it is no diffusers pipeline or only part of one")
    for name, kind in _components(index):
        part = folder / name
        if not part.is_dir() or not any(part.iterdir()):
            raise LoadError(f"{str(folder)!r} is half downloaded: there is nothing in {name}/, which holds its {kind}")
        for file in sorted(part.rglob("*")):
            if file.is_file():
                _check_file(file, folder)
        _check_weights(part, folder)


def _components(index: Path) -> list[tuple[str, str]]:
    """Name and class name of every component that has a folder."""
    try:
        data = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LoadError(f"{str(index)!r} cannot be read: {_first_line(error)}") from None
    if not isinstance(data, dict):
        raise LoadError(f"{str(index)!r} is no list of components")
    pairs = [(n, v) for n, v in data.items() if not n.startswith("_") and isinstance(v, list) and len(v) == 2]
    return [(name, str(value[1])) for name, value in pairs if value[0] is not None and value[1] is not None]


def _check_file(file: Path, folder: Path) -> None:
    name = file.relative_to(folder)
    if file.name.endswith((".incomplete", ".part", ".tmp")):
        raise LoadError(f"{str(folder)!r} is half downloaded: {name} is a part of a file")
    size = file.stat().st_size
    if size == 0 and file.suffix in (*WEIGHTS, ".json", ".model"):
        raise LoadError(f"{str(folder)!r} is half downloaded: {name} is empty")
    if file.suffix not in (*WEIGHTS, ".json"):
        return
    with file.open("rb") as stream:
        head = stream.read(64)
    if head.startswith(b"version https://git-lfs"):
        raise LoadError(f"{str(folder)!r}: {name} is a Git LFS pointer, not the file; run git lfs pull there")
    if file.suffix == ".safetensors":
        expected = _safetensors_size(file)
        if expected is None or size < expected:
            whole = f"has {size} of {expected} bytes" if expected else "has no readable header"
            raise LoadError(f"{str(folder)!r} is half downloaded: {name} {whole}")
    if file.name.endswith(".index.json"):
        _check_shards(file, folder)


def _safetensors_size(file: Path) -> int | None:
    """How long the file says that it is, bytes; None if its header is cut off."""
    with file.open("rb") as stream:
        prefix = stream.read(8)
        if len(prefix) < 8:
            return None
        (length,) = struct.unpack("<Q", prefix)
        if length > 10**9:
            return None
        try:
            header = json.loads(stream.read(length))
        except ValueError:
            return None
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return 8 + length + max(ends, default=0)


def _check_shards(index: Path, folder: Path) -> None:
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError):
        raise LoadError(f"{str(folder)!r}: {index.relative_to(folder)} is not a list of weight files") from None
    missing = sorted(shard for shard in shards if not (index.parent / shard).is_file())
    if missing:
        part = index.parent.relative_to(folder)
        raise LoadError(
            f"{str(folder)!r} is half downloaded: {len(missing)} of {len(shards)} weight files of {part}/ are missing "
            f"({missing[0]} is the first)"
        )


def _check_weights(part: Path, folder: Path) -> None:
    """A component that is a model has weights: its config.json says that it is one."""
    if not (part / "config.json").is_file():
        if not any(part.glob("*.json")):
            raise LoadError(f"{str(folder)!r} is half downloaded: {part.name}/ has no configuration")
        return
    try:
        config = json.loads((part / "config.json").read_text(encoding="utf-8"))
    except ValueError:
        raise LoadError(f"{str(folder)!r}: {part.name}/config.json is not whole JSON") from None
    is_model = "architectures" in config or "_class_name" in config
    if is_model and not any(file.suffix in WEIGHTS for file in part.iterdir()):
        raise LoadError(f"{str(folder)!r} is half downloaded: {part.name}/ has no weights")


def pick_device(device: str, require_gpu: bool = False, rank: int | None = None) -> str:
    """A device that torch has.

    Args:
        rank: number of this process on this machine, where several share one picture: that of its GPU.

    Raises:
        LoadError: there is no such device, or no GPU where one is required.
    """
    import torch

    gpu = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else None
    if require_gpu and gpu is None:
        raise LoadError("--require-gpu: torch sees no GPU here; chitu env lists the devices it sees")
    found = (gpu or "cpu") if device == "auto" else device
    if rank is not None and found == "cuda":
        found = f"cuda:{rank}"
    known = ["auto", "cpu", "cuda", "mps"]
    if re.fullmatch(r"(cpu|mps|cuda(:\d+)?)", found) is None:
        raise LoadError(f"unknown device {device!r}{nearest(device, known)}")
    count = torch.cuda.device_count()
    if found.startswith("cuda") and int(found.partition(":")[2] or 0) >= count:
        raise LoadError(f"--device {found}: torch sees {count} CUDA devices here; known: {', '.join(_present(count))}")
    if found == "mps" and gpu != "mps":
        raise LoadError(f"--device mps: torch has no such device here; known: {', '.join(_present(count))}")
    if require_gpu and found == "cpu":
        raise LoadError("--require-gpu and --device cpu contradict each other; leave one out")
    return found


def _present(cuda: int) -> Iterator[str]:
    yield from ("auto", "cpu", *(f"cuda:{index}" for index in range(cuda)))


def pick_dtype(dtype: str, device: str) -> Any:
    """The torch dtype of that name; auto is bfloat16 on a GPU and float32 on a CPU.

    Raises:
        LoadError: it is not one of `DTYPES`.
    """
    import torch

    if dtype not in DTYPES:
        raise LoadError(f"unknown dtype {dtype!r}{nearest(dtype, DTYPES)}")
    if dtype == "auto":
        return torch.float32 if device == "cpu" else torch.bfloat16
    return getattr(torch, dtype)


def load_pipeline(source: Path | str, *, dtype: Any, device: str) -> Any:
    """Load the pipeline at `source`, see `model_source`.

    Raises:
        LoadError: diffusers cannot load it; the first line of what it says is in the message.
    """
    import diffusers

    if isinstance(source, Path):
        _check_class(source, diffusers)
    try:
        pipe = diffusers.DiffusionPipeline.from_pretrained(str(source), dtype=dtype)
    except (OSError, ValueError, ImportError, KeyError) as error:
        what = f"id {str(source)!r}" if isinstance(source, str) else repr(str(source))
        raise LoadError(f"the model {what} cannot be loaded: {_first_line(error)}") from error
    return pipe.to(device)


def _check_class(folder: Path, diffusers: Any) -> None:
    name = json.loads((folder / "model_index.json").read_text(encoding="utf-8")).get("_class_name")
    if isinstance(name, list):
        name = name[-1]
    if not isinstance(name, str) or not hasattr(diffusers, name):
        raise LoadError(
            f"{str(folder)!r} is a {name}, which diffusers {diffusers.__version__} does not have; a newer diffusers may"
        )


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
