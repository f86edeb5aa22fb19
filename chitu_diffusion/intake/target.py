"""What a word on the command line stands for: an id, a folder, a pipeline class, or a Python file that builds a pipeline."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from chitu_hooks.errors import nearest

from .errors import IntakeError, told
from .skeleton import Classes, annotated_classes, from_class, from_folder, hushed, read_json

MARKS = re.compile(r"[^a-z0-9]+")


@dataclass
class Target:
    """A pipeline that is to be looked at."""

    word: str
    """As typed."""
    kind: Literal["id", "folder", "class", "file"]
    pipe: Any
    classes: Classes
    """Component -> class, also of components that are not loaded."""
    folder: Path | None = None
    """Where configurations and the model card are, for a folder and an id."""
    call: Callable[[Any], Any] | None = field(default=None, repr=False)
    """``call(pipe)`` of the Python file: one small call."""

    loaded: bool = False
    """Whether the weights of a folder or an id have been loaded."""

    @property
    def has_weights(self) -> bool:
        """Whether the pipeline can be called."""
        return self.kind == "file" or self.loaded

    @property
    def name(self) -> str:
        """The family's name: that of the folder in which diffusers keeps the pipeline, else the class's."""
        for cls in type(self.pipe).__mro__:
            parts = cls.__module__.split(".")
            if parts[:2] == ["diffusers", "pipelines"] and len(parts) > 3:
                return parts[2] if parts[2] != "deprecated" else parts[3]
        return MARKS.sub("_", type(self.pipe).__name__.removesuffix("Pipeline").lower())


def find_target(word: str | None) -> Target:
    """The pipeline that `word` stands for; None stands for the embedded model.

    Raises:
        IntakeError: there is no such thing, or it cannot be read; the message has the nearest that there is.
    """
    from chitu_diffusion.demo import model_folder

    if word is None:
        return _folder(str(model_folder()), model_folder())
    path = Path(word).expanduser()
    if word.endswith(".py"):
        return _file(word, path)
    if path.is_dir():
        return _folder(word, path)
    if path.exists():
        raise IntakeError(
            f"{word!r} is a file; give a folder with a model_index.json, or a Python file (.py) with build()"
        )
    if re.fullmatch(r"[A-Za-z]\w*", word):
        return _class(word)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", word) and not path.parent.is_dir():
        return _id(word)
    beside = [str(path.parent / p.name) for p in path.parent.iterdir()] if path.parent.is_dir() else []
    raise IntakeError(f"no model folder or file {word!r}{nearest(word, beside) if beside else ''}")


def pipeline_classes() -> list[str]:
    """Names of diffusers' pipeline classes, without importing them."""
    import diffusers

    names = {name for group in diffusers._import_structure.values() for name in group}
    return sorted(name for name in names if name.endswith("Pipeline"))


def _class(word: str) -> Target:
    return Target(word, "class", *from_class(_pipeline_class(word, "")))


def _pipeline_class(name: Any, where: str) -> type:
    """The class of that name in diffusers.

    Raises:
        IntakeError: there is none, or it is no ordinary pipeline.
    """
    import diffusers

    try:
        cls = getattr(diffusers, name) if isinstance(name, str) else None
    except (AttributeError, ImportError, RuntimeError):
        cls = None
    if isinstance(cls, type) and issubclass(cls, diffusers.ModularPipeline):
        raise IntakeError(
            f"{where}{name} is a modular pipeline, whose blocks have no call to hook; give an ordinary one"
        )
    known = pipeline_classes()
    if not (isinstance(cls, type) and issubclass(cls, diffusers.DiffusionPipeline)) and name in known:
        raise IntakeError(f"{where}{name} is no DiffusionPipeline here: it needs a package that is not installed")
    if (
        not (isinstance(cls, type) and issubclass(cls, diffusers.DiffusionPipeline))
        or cls is diffusers.DiffusionPipeline
    ):
        raise IntakeError(
            f"{where}diffusers {diffusers.__version__} has no pipeline class {name!r}{nearest(str(name), known)}"
        )
    return cls


def _folder(word: str, folder: Path, kind: Literal["id", "folder"] = "folder") -> Target:
    index = folder / "model_index.json"
    if not index.is_file():
        raise IntakeError(f"{word!r} has no model_index.json, so it is no diffusers pipeline or only part of one")
    name = read_json(index).get("_class_name")
    cls = _pipeline_class(name[-1] if isinstance(name, list) and name else name, f"{word!r}: ")
    return Target(word, kind, *from_folder(folder, cls), folder=folder)


def _id(word: str) -> Target:
    """Fetch what describes the model, no weights: a few files of some kilobytes."""
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            word, allow_patterns=["model_index.json", "*/config.json", "*/scheduler_config.json", "README.md"]
        )
    except Exception as error:  # the Hub's client has many ways to say no
        raise IntakeError(
            f"the configurations of {word!r} cannot be fetched ({told(error)}); check the id, or give a folder"
        ) from error
    return _folder(word, Path(folder), "id")


def _file(word: str, path: Path) -> Target:
    if not path.is_file():
        beside = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise IntakeError(f"no file {word!r}{nearest(path.name, beside)}")
    try:
        with hushed():
            names = runpy.run_path(str(path))
            build = names.get("build")
            pipe = build() if callable(build) else names.get("pipe")
    except (Exception, SystemExit) as error:  # the file is the user's: whatever it raises is told in one sentence
        raise IntakeError(f"{word!r} does not run: {told(error)}") from error
    if pipe is None:
        raise IntakeError(f"{word!r} has neither build() nor pipe; one of them is to give a diffusers pipeline")
    if not isinstance(getattr(pipe, "components", None), dict) or not callable(pipe):
        raise IntakeError(f"{word!r} gives a {type(pipe).__name__}; build() is to return a diffusers pipeline")
    classes = annotated_classes(type(pipe))
    classes |= {name: type(part) for name, part in pipe.components.items() if part is not None}
    call = names.get("call")
    return Target(word, "file", pipe, classes, call=call if callable(call) else None)
