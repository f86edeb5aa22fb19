"""The house rules: where things live, what may import what, how long a file may be, and which names are public."""

from __future__ import annotations

import ast
import importlib
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

MAX_FILE_LINES = 450
MAX_MAP_LINES = 40

# Package -> the packages of ours that it may import, besides itself. A module belongs to the longest name that it lies
# in, so that "chitu_diffusion" stands for the modules directly in it, and for packages that are not named here.
FEATURES = {"chitu_diffusion.attention", "chitu_diffusion.parallel", "chitu_diffusion.flexcache"}
BASE = {"chitu_hooks", "chitu_diffusion", "chitu_diffusion.demo", *FEATURES}
ARROWS: dict[str, set[str]] = {
    "chitu_hooks": set(),
    "adapters": {"chitu_hooks"},
    **{feature: {"chitu_hooks"} for feature in FEATURES},
    "chitu_diffusion.demo": set(),
    "chitu_diffusion.evaluation": {"chitu_hooks"},
    "chitu_diffusion": {*BASE, "chitu_diffusion.runtime"},
    "chitu_diffusion.runtime": BASE,
    "chitu_diffusion.bench": {*BASE, "chitu_diffusion.runtime", "chitu_diffusion.evaluation"},
    "chitu_diffusion.intake": {*BASE, "chitu_diffusion.runtime", "chitu_diffusion.evaluation"},
    "chitu_diffusion.cli": {
        *(
            *BASE,
            "chitu_diffusion.runtime",
            "chitu_diffusion.evaluation",
            "chitu_diffusion.bench",
            "chitu_diffusion.intake",
        ),
    },
}
ENGINE_NEEDS = {"torch", "diffusers", "wrapt"}

PUBLIC = {
    "chitu_hooks": {
        *("AttentionContext", "BlockInputs", "Branch", "Call", "ChituError", "ChituWarning", "Exactness", "Feature"),
        *("Generation", "GenerationError", "Handle", "HookMap", "HookMapError", "Order", "PatchError", "Refusal"),
        *("RefusedError", "Report", "Sites", "Stack", "Step", "StepCall", "Streams", "load_hook_map", "patch"),
    },
    "chitu_diffusion": {
        *("ChituError", "EasyCache", "FBCache", "Feature", "Handle", "HookMap", "MagCache", "Stack", "Static"),
        *("Parallel", "BlockDance", "Cubic", "MeanCache", "PAB", "Planned", "TaylorSeer", "TeaCache", "patch"),
    },
}


@cache
def files() -> tuple[Path, ...]:
    """Every file that git tracks or would add; without git, every file outside hidden and built folders."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode == 0:
        found = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:
        built = ("__pycache__", "build", "dist", "outputs", "upstream")
        found = [
            path
            for path in ROOT.rglob("*")
            if not any(part in built or (part[0] == "." and part != ".ci") for part in path.relative_to(ROOT).parts)
        ]
    return tuple(sorted(path for path in found if path.is_file()))


def named(suffix: str, *folders: str) -> list[Path]:
    return [
        path
        for path in files()
        if path.suffix == suffix and (not folders or path.relative_to(ROOT).parts[0] in folders)
    ]


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def text_of(path: Path) -> str | None:
    """The text of `path`, or None if it is not text."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


# Written so that the patterns do not find themselves.
FOREIGN = {
    "a path of one machine": re.compile(r"(?<![\w.:~$}/-])/(?:work|root|home/\w+|Users/\w+|mnt/\w+)/[\w.]"),
    "how the project is made": re.compile(
        r"\bthis[ ]session\b|\bwork[p]lace\b|\bshared/(?:design|research|hooks)\b|\bCE[O]\b"
    ),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_no_file_tells_where_it_was_written(what: str) -> None:
    found = []
    for path in files():
        for number, line in enumerate((text_of(path) or "").splitlines(), 1):
            if match := FOREIGN[what].search(line):
                found.append(f"{name(path)}:{number}: {line[max(0, match.start() - 20) : match.end() + 30]}")
    assert found == []


def test_files_are_short() -> None:
    lengths = {name(path): len(path.read_text(encoding="utf-8").splitlines()) for path in named(".py")}
    assert {path: lines for path, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


def code_lines(source: str) -> int:
    """Lines that hold code: no comment, no blank line, no docstring of the module."""
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skipped:
            lines |= set(range(token.start[0], token.end[0] + 1))
    body = ast.parse(source).body
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        lines -= set(range(body[0].lineno, (body[0].end_lineno or body[0].lineno) + 1))
    return len(lines)


def adapters() -> list[Path]:
    return named(".py", "adapters")


def test_there_are_adapters() -> None:
    assert adapters()


@pytest.mark.parametrize("path", adapters(), ids=name)
def test_adapter_is_short_and_only_data(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert code_lines(source) <= MAX_MAP_LINES
    tree = ast.parse(source)
    code = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda)
    ]
    assert code == [], "a hook map holds data, no functions and no classes"
    defined = []
    for node in tree.body:
        if isinstance(node, ast.Assign):
            defined += [ast.unparse(target) for target in node.targets]
            if defined[-1] != "HOOK_MAP":  # a value that HOOK_MAP uses twice may have a name, if it is plain data
                ast.literal_eval(node.value)
        else:
            assert isinstance(node, ast.Import | ast.ImportFrom | ast.Expr), (
                f"line {node.lineno} of a hook map is no data"
            )
    assert defined.count("HOOK_MAP") == 1
    assert all(other.isupper() for other in defined)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of everything that `path` imports, inside functions and TYPE_CHECKING too."""
    module = module_name(path)
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *filter(None, [node.module])])
            for alias in node.names:
                yield node.lineno, f"{source}.{alias.name}"


def owner(dotted: str, packages: set[str]) -> str | None:
    """The longest of `packages` that `dotted` lies in."""
    inside = [package for package in packages if dotted == package or dotted.startswith(package + ".")]
    return max(inside, key=len, default=None)


def test_imports_follow_the_arrows() -> None:
    packages = set(ARROWS)
    wrong = []
    for path in named(".py", "chitu_hooks", "chitu_diffusion", "adapters"):
        own = owner(module_name(path), packages)
        assert own is not None
        for line, imported in imports(path):
            target = owner(imported, packages)
            if target is not None and target != own and target not in ARROWS[own]:
                wrong.append(f"{name(path)}:{line}: {own} imports {imported}")
    assert wrong == []


def test_the_engine_stands_on_torch_diffusers_and_wrapt() -> None:
    known = ENGINE_NEEDS | {"chitu_hooks", *sys.stdlib_module_names}
    others = [
        f"{name(path)}:{line}: {imported}"
        for path in named(".py", "chitu_hooks")
        for line, imported in imports(path)
        if imported.split(".")[0] not in known
    ]
    assert others == []


@pytest.mark.parametrize("package", PUBLIC)
def test_public_names_are_frozen(package: str) -> None:
    module = importlib.import_module(package)
    assert len(module.__all__) == len(set(module.__all__))
    assert set(module.__all__) == PUBLIC[package]
    assert [public for public in module.__all__ if not hasattr(module, public)] == []


def slugs(source: str) -> set[str]:
    """The anchors that a page's headings make, as GitHub makes them."""
    headings = re.findall(r"^#{1,6} +(.+?) *#*$", re.sub(r"^```.*?^```", "", source, flags=re.M | re.S), flags=re.M)
    return {
        re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", h)).lower().replace(" ", "-") for h in headings
    }


LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)|(?:src|href)=\"([^\"]+)\"|^\[[^]]+\]:\s*(\S+)", re.M)


@pytest.mark.parametrize("path", named(".md"), ids=name)
def test_links_resolve(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    prose = re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", source, flags=re.M | re.S))
    broken = []
    for match in LINK.finditer(prose):
        link = next(filter(None, match.groups()))
        if re.match(r"[a-z][a-z+.-]*:", link):
            continue
        target, _, anchor = link.partition("#")
        page = (path.parent / target).resolve() if target else path
        known = page in files() or (page.is_dir() and page.is_relative_to(ROOT))
        if not known or (anchor and page.suffix == ".md" and anchor not in slugs(page.read_text(encoding="utf-8"))):
            broken.append(link)
    assert broken == []


def test_readme_and_ci_run_the_same_tests() -> None:
    """`.ci/run` takes the test command out of the README, so that the two cannot differ."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    marked = re.findall(r"^<!-- test-command -->\n```bash\n(.*?)^```$", readme, flags=re.M | re.S)
    assert len(marked) == 1 == readme.count("<!-- test-command -->"), "README.md marks one test command"
    lines = [line for line in marked[0].splitlines() if line.strip()]
    command = " && ".join(lines)
    assert "-c tests/constraints.txt" in command
    assert re.search(r" && python -m pytest\b[^&|;]*$", command), "installation first, then one call of pytest"
    script = (ROOT / ".ci/run").read_text()
    assert "/^<!-- test-command -->$/,/^```$/p' README.md" in script
    assert "pytest -" not in script and "pip install" not in script, ".ci/run has no command of its own"
