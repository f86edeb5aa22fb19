"""``chitu adapt``: look at a model, check the map that comes of it, and write map, page, gap report and test in one move."""

from __future__ import annotations

import contextlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chitu_diffusion.adapters
from chitu_diffusion.runtime import DiffusionTask
from chitu_hooks import HookMap, load_hook_map
from chitu_hooks.find import lineage

from .check import Check, check_map
from .errors import IntakeError
from .inspection import Inspection, inspect_target
from .page import page
from .run import load_weights, runner
from .target import Target, find_target
from .upstream import check_name, make_folder

TEST = '''"""The hook map of {pipeline}: it fits{and_acts}."""

from pathlib import Path

from chitu_diffusion.intake.check import check_adapter

ROOT = Path(__file__).resolve().parent.parent


def test_{name}() -> None:
    assert check_adapter(ROOT / "adapters/{name}.py", {model}) == []
'''


@dataclass(frozen=True)
class Adapted:
    """What was written, and how far the map can be trusted."""

    inspection: Inspection
    files: dict[Path, str]
    checks: list[Check] | None
    """None if there was nothing to call the pipeline with."""

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks or ())

    @property
    def questions(self) -> tuple[str, ...]:
        return self.inspection.draft.questions if self.inspection.draft is not None else ()


def adapt_model(word: str | None, root: Path, name: str | None, task: DiffusionTask) -> Adapted:
    """Write what a new family needs below `root`.

    Args:
        word: see `find_target`; a folder or an id is loaded with its weights.
        root: the repository, or any folder.
        name: of the family; the target's own if None.
        task: how a pipeline with text encoders is called.

    Raises:
        ChituError: the model cannot be read or called, has a map, or a file is there already. Nothing was written.
    """
    target = find_target(word)
    name = check_name(name if name is not None else target.name)
    _refuse_claimed(target.pipe, root)
    _refuse_existing(_paths(target, root, name))
    target = load_weights(target, task)
    found = inspect_target(target, task=task, name=name)
    if found.draft is None:  # a pipeline that no map claims has an inferred one
        raise IntakeError(f"{type(target.pipe).__name__} has a hook map, {found.hook_map.name!r}")
    text = found.map_text or ""
    checks = check_map(target.pipe, _read_back(text), runner(target, task)) if found.seen else None
    adapted = Adapted(found, _files(found, root, text, checks), checks)
    if adapted.passed:
        _write_all(adapted.files)
    return adapted


def _refuse_claimed(pipe: Any, root: Path) -> None:
    """Raise if some map is for this pipeline already: two that claim one pipeline are an error."""
    names = lineage(pipe)
    for folder in dict.fromkeys((chitu_diffusion.adapters.adapters_folder(), root / "adapters")):
        for path in sorted(folder.glob("[!_]*.py")):
            hook_map = load_hook_map(path)
            claimed = [name for name in names if name in hook_map.pipelines]
            if claimed:
                raise IntakeError(
                    f"{claimed[0]} has a hook map already, {hook_map.name!r} ({path.name}); chitu inspect shows what it covers"
                )


def _paths(target: Target, root: Path, name: str) -> dict[str, Path]:
    """What is written -> where."""
    paths = {
        "map": root / "adapters" / f"{name}.py",
        "page": root / "refs" / name / "README.md",
        "gap": root / "refs" / name / "gap.md",
        "test": root / "tests" / f"test_adapter_{name}.py",
    }
    if target.kind == "file":
        paths["model"] = root / "tests/adapted" / f"{name}.py"
    elif target.folder is not None:
        paths["model"] = root / "tests/adapted" / name
    return paths


def _refuse_existing(paths: dict[str, Path]) -> None:
    for path in paths.values():
        if os.path.lexists(path):
            raise IntakeError(
                f"{str(path)!r} exists already and is never overwritten; delete it, or give another --name"
            )


def _read_back(text: str) -> HookMap:
    """The map of an adapter file that is not written yet."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "adapter.py")
        path.write_text(text, encoding="utf-8")
        return load_hook_map(path)


def _files(found: Inspection, root: Path, text: str, checks: list[Check] | None) -> dict[Path, str]:
    """Path -> text of everything that is to be written."""
    target, name = found.target, found.hook_map.name
    paths = _paths(target, root, name)
    files = {
        paths["map"]: text,
        paths["page"]: page(found, root / "refs" / name, checks),
        paths["gap"]: found.gap.to_markdown(),
    }
    model = repr(type(target.pipe).__name__).replace("'", '"')
    if target.kind == "file":
        files[paths["model"]] = Path(target.word).expanduser().read_text(encoding="utf-8")
        model = f'str(ROOT / "tests/adapted/{name}.py")'
    elif target.folder is not None:
        for file in described(target.folder):
            files[paths["model"] / file.relative_to(target.folder)] = file.read_text(encoding="utf-8")
        model = f'str(ROOT / "tests/adapted/{name}")'
    acts = ", and a small call gives the bits of the unhooked one" if target.call is not None else ""
    files[paths["test"]] = TEST.format(pipeline=type(target.pipe).__name__, and_acts=acts, name=name, model=model)
    return files


def described(folder: Path) -> list[Path]:
    """The files of a pipeline's folder that describe it: index and configurations, no weights."""
    found = [folder / "model_index.json"]
    for part in sorted(path for path in folder.iterdir() if path.is_dir()):
        found += [part / name for name in ("config.json", "scheduler_config.json") if (part / name).is_file()]
    return found


def _write_all(files: dict[Path, str]) -> None:
    """Write every file, or none."""
    written: list[Path] = []
    made: list[Path] = []
    try:
        for path, text in files.items():
            made = [*make_folder(path.parent), *made]
            with path.open("x", encoding="utf-8") as stream:
                written.append(path)
                stream.write(text)
    except BaseException as error:
        for path in written:
            path.unlink(missing_ok=True)
        for folder in made:
            with contextlib.suppress(OSError):
                folder.rmdir()
        if isinstance(error, OSError):
            raise IntakeError(f"{error.filename!r} cannot be written: {error.strerror}; nothing was") from None
        raise
