"""The last of the walk: is the working tree fit to be committed, and which commits does it make?"""

from __future__ import annotations

import ast
import subprocess
from dataclasses import dataclass
from pathlib import Path

from .errors import IntakeError

DEBUG_FOLDERS = ("debug", "debug_output", "tmp", "temp", "scratch", "outputs", "dumps")
DEBUGGERS = {"breakpoint", "pdb.set_trace", "ipdb.set_trace"}
DOMAINS = (
    ("chitu_hooks", "Engine"),
    ("chitu_diffusion", "Features and command line"),
    ("adapters", "Hook maps"),
    ("refs", "Reference pages"),
    ("ChituBench", "Measurements"),
    ("docs", "Documentation"),
    ("tests", "Tests"),
)
"""Top folder -> how a commit of it begins; anything else is a commit of its own kind."""


@dataclass(frozen=True)
class Finding:
    """One check of the working tree."""

    name: str
    wrong: tuple[str, ...]
    """What is wrong, a line each; empty if nothing is."""


@dataclass(frozen=True)
class Commit:
    """Files that belong in one commit."""

    subject: str
    files: tuple[str, ...]


def finish(root: Path) -> tuple[list[Finding], list[Commit], list[str]]:
    """Check the repository at `root`; nothing is changed.

    Returns:
        The findings, the commits that the changes make, and the commands that validate them.

    Raises:
        IntakeError: `root` is in no git repository.
    """
    top = _git(
        root, "rev-parse", "--show-toplevel", fail=f"{str(root)!r} is in no git repository; --finish looks at one"
    ).strip()
    root = Path(top)
    tracked, untracked = _names(root, "--cached"), _names(root, "--others", "--exclude-standard")
    changed = sorted({*untracked, *_lines(_git(root, "diff", "--name-only", "HEAD"))})
    findings = [
        Finding("git diff --check", tuple(_whitespace(root, untracked))),
        Finding("compileall", tuple(_syntax(root, [*tracked, *untracked]))),
        Finding("debugger calls", tuple(_debuggers(root, changed))),
        Finding("debug folders", tuple(_debug_folders(root, [*tracked, *untracked]))),
        Finding("symlinks", tuple(name for name in [*tracked, *untracked] if (root / name).is_symlink())),
        Finding("stale plots", tuple(_stale_plots(root, tracked, untracked, changed))),
        Finding(
            "bytecode", tuple(n for n in [*tracked, *untracked] if n.endswith((".pyc", ".pyo")) or "__pycache__" in n)
        ),
    ]
    return findings, _commits(changed), _validation(root, changed)


# -- checks ------------------------------------------------------------------------------------------------------------


def _whitespace(root: Path, untracked: list[str]) -> list[str]:
    """What ``git diff --check`` says of changed and of new files."""
    found = _lines(_git(root, "diff", "--check", "HEAD"))
    for name in untracked:
        found += _lines(_git(root, "diff", "--no-index", "--check", "--", "/dev/null", name))
    return [line for line in found if not line.startswith("+")]


def _syntax(root: Path, names: list[str]) -> list[str]:
    """Python files that do not compile. No bytecode is written."""
    wrong = []
    for name in names:
        path = root / name
        if path.suffix == ".py" and path.is_file():
            try:
                compile(path.read_bytes(), name, "exec", dont_inherit=True)
            except (SyntaxError, ValueError) as error:
                wrong.append(f"{name}:{getattr(error, 'lineno', 1) or 1}: {error}")
    return wrong


def _debuggers(root: Path, changed: list[str]) -> list[str]:
    from .source import calls

    wrong = []
    for name in changed:
        path = root / name
        if path.suffix == ".py" and path.is_file():
            try:
                tree = ast.parse(path.read_bytes())
            except SyntaxError:
                continue
            wrong += [f"{name}:{node.lineno}: {call}" for call, node in calls(tree) if call in DEBUGGERS]
    return wrong


def _debug_folders(root: Path, names: list[str]) -> list[str]:
    """Folders of debug output that git tracks or would add."""
    found = {
        "/".join(parts[: place + 1])
        for parts in (name.split("/")[:-1] for name in names)
        for place, part in enumerate(parts)
        if part.lower() in DEBUG_FOLDERS or part.lower().startswith("debug-")
    }
    return sorted(found)


def _stale_plots(root: Path, tracked: list[str], untracked: list[str], changed: list[str]) -> list[str]:
    """Pictures in a ``plots`` folder that are older than the results of the same name."""
    results = {Path(n).stem: n for n in [*tracked, *untracked] if "/results/" in f"/{n}" and n.endswith(".json")}
    wrong = []
    for name in [*tracked, *untracked]:
        if "/plots/" not in f"/{name}" or not name.endswith((".png", ".svg")):
            continue
        stem = Path(name).stem
        source = next((results[key] for key in sorted(results, key=len, reverse=True) if stem.startswith(key)), None)
        if source is not None and _older(root, name, source, changed):
            wrong.append(f"{name} is older than {source}; draw it again")
    return wrong


def _older(root: Path, name: str, other: str, changed: list[str]) -> bool:
    """Whether `name` was written before `other`: by commits, or on disk if both have changed since."""
    if name in changed and other in changed:
        return (root / name).is_file() and (root / name).stat().st_mtime < (root / other).stat().st_mtime
    if name in changed or other in changed:
        return other in changed
    times = [_git(root, "log", "-1", "--format=%ct", "--", path).strip() or "0" for path in (name, other)]
    return int(times[0]) < int(times[1])


# -- commits and commands ----------------------------------------------------------------------------------------------


def _commits(changed: list[str]) -> list[Commit]:
    """The changed files, a commit for each domain and, within a domain, for each family."""
    commits = []
    for folder, subject in (*DOMAINS, ("", "Everything else")):
        files = [name for name in changed if _domain(name) == folder]
        if files:
            commits.append(Commit(f"{subject}: {_about(files)}", tuple(files)))
    return commits


def _domain(name: str) -> str:
    top = name.partition("/")[0]
    return top if top in dict(DOMAINS) else ""


def _about(files: list[str]) -> str:
    stems = [
        Path(name).parent.name if Path(name).name in ("README.md", "gap.md") else Path(name).stem for name in files
    ]
    names = list(dict.fromkeys(stem.removeprefix("test_adapter_") for stem in stems if stem))
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _validation(root: Path, changed: list[str]) -> list[str]:
    """The commands whose output belongs in the description of the change."""
    tests = [name for name in changed if name.startswith("tests/test_") and name.endswith(".py")]
    house = ["tests/test_house.py"] if (root / "tests/test_house.py").is_file() else []
    commands = (
        [f"python -m pytest -q {' '.join([*house, *(t for t in tests if t not in house)])}"] if house or tests else []
    )
    commands += ["ruff check . && ruff format --check ."] if (root / "pyproject.toml").is_file() else []
    maps = [name for name in changed if name.startswith("adapters/") and name.endswith(".py")]
    commands += [f"chitu verify MODEL --hook-map {name}" for name in maps]
    return commands


# -- git ---------------------------------------------------------------------------------------------------------------


def _names(root: Path, *options: str) -> list[str]:
    return [name for name in _git(root, "ls-files", "-z", *options).split("\0") if name]


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


def _git(root: Path, *words: str, fail: str = "") -> str:
    """What git prints; an exit code other than 0 is an answer too, unless `fail` says otherwise."""
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise IntakeError(f"git cannot be started: {error.strerror}") from None
    if fail and done.returncode:
        raise IntakeError(fail)
    return done.stdout
