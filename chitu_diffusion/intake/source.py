"""The source of a pipeline: lines of code, the functions that its call reaches, and what its denoising loop does."""

from __future__ import annotations

import ast
import inspect
import io
import sys
import textwrap
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

Place = Literal["before", "loop", "after"]
"""Where in ``pipe(...)`` something is called: before the first step, in a step, or after the last one."""

NOT_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip
INFRASTRUCTURE = (
    "diffusers.pipelines.pipeline_utils",
    "diffusers.configuration_utils",
    "diffusers.loaders",
    "diffusers.utils",
    "diffusers.image_processor",
    "diffusers.video_processor",
    "diffusers.models.modeling_utils",
)
"""Modules of diffusers that every pipeline shares; what they hold is not counted."""


@cache
def source_of(thing: Any) -> str:
    """The dedented source of a class or function, or nothing where there is none."""
    file, first, last = _span(thing)
    if file:
        return textwrap.dedent("\n".join(_read(file).splitlines()[first - 1 : last]) + "\n")
    try:
        return textwrap.dedent(inspect.getsource(thing))
    except (OSError, TypeError):
        return ""


@cache
def _span(thing: Any) -> tuple[str, int, int]:
    """File, first and last line of a definition; `inspect` walks the whole file anew for each class."""
    try:
        file = inspect.getsourcefile(thing) or ""
    except TypeError:  # a class of a file that was run and is no module: its methods know where they stand
        codes = [getattr(value, "__code__", None) for value in vars(thing).values()] if isinstance(thing, type) else []
        file = next((code.co_filename for code in codes if code is not None), "")
    first, last = _definitions(file).get(getattr(thing, "__qualname__", ""), (0, 0)) if file else (0, 0)
    return (file, first, last) if first else ("", 0, 0)


@cache
def _definitions(file: str) -> dict[str, tuple[int, int]]:
    """Qualified name -> first and last line of every class and function of a file; the last of several of one name."""
    found: dict[str, tuple[int, int]] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                start = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
                found[prefix + child.name] = (start, child.end_lineno or child.lineno)
                inner = "" if isinstance(child, ast.ClassDef) else "<locals>."
                visit(child, f"{prefix}{child.name}.{inner}")
            else:
                visit(child, prefix)

    try:
        visit(ast.parse(_read(file)), "")
    except SyntaxError:
        return {}
    return found


@cache
def _read(file: str) -> str:
    try:
        with tokenize.open(file) as stream:
            return stream.read()
    except (OSError, SyntaxError, UnicodeDecodeError):
        return ""


@cache
def tree_of(thing: Any) -> ast.AST:
    """The parsed source of a class or function."""
    try:
        return ast.parse(source_of(thing))
    except SyntaxError:
        return ast.Module([], [])


def code_lines(source: str) -> set[int]:
    """Numbers, from 1, of the lines that hold code: no comment, no blank line, no docstring."""
    lines: set[int] = set()
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type not in NOT_CODE:
                lines |= set(range(token.start[0], token.end[0] + 1))
        tree = ast.parse(source)
    except (tokenize.TokenError, SyntaxError):
        return set(range(1, len(source.splitlines()) + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                lines -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


def count(thing: Any) -> int:
    """Lines of code of a class or function."""
    return len(code_lines(source_of(thing)))


def place_in_file(thing: Any, line: int = 1) -> str:
    """``file.py:123`` of line `line` of the source of `thing`."""
    file, first, _ = _span(thing)
    return f"{file.rsplit('/', 1)[-1]}:{first + line - 1}" if file else ""


def dotted(node: ast.AST) -> str:
    """``self.vae.decode`` of an attribute expression; empty for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def calls(node: ast.AST) -> list[tuple[str, ast.Call]]:
    """Dotted name and node of every call below `node`; calls of calls have an empty name."""
    return [(dotted(found.func), found) for found in ast.walk(node) if isinstance(found, ast.Call)]


@dataclass
class Reached:
    """A function that ``pipe(...)`` reaches."""

    name: str
    function: Callable[..., Any]
    places: set[Place] = field(default_factory=set)


@dataclass(frozen=True)
class Statement:
    """A statement of the denoising loop, or a call outside it."""

    owner: Callable[..., Any]
    node: ast.stmt
    call: str
    """Dotted name of the call that makes it stand out."""

    @property
    def lines(self) -> int:
        code = code_lines(source_of(self.owner))
        return len(code & set(range(self.node.lineno, (self.node.end_lineno or self.node.lineno) + 1)))


class PipelineSource:
    """What is written in a pipeline's `__call__` and in the functions that it reaches.

    Args:
        cls: the pipeline's class.
        denoisers: attributes of it that hold a denoiser.
    """

    def __init__(self, cls: type, denoisers: tuple[str, ...]) -> None:
        self.cls = cls
        self.denoisers = tuple(f"self.{name}" for name in denoisers)
        self.call: Callable[..., Any] = inspect.unwrap(cls.__call__)
        self.aliases = self._aliases()
        """Names in `__call__` that stand for a denoiser: ``current_model = self.transformer``."""
        self.steppers = self._steppers()
        self.loops = self._find_loops()
        self.reached: dict[str, Reached] = {}
        self._follow(self.call, "before")

    def _aliases(self) -> tuple[str, ...]:
        found = set()
        for node in ast.walk(tree_of(self.call)):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                values = [node.value.body, node.value.orelse] if isinstance(node.value, ast.IfExp) else [node.value]
                if any(dotted(value) in self.denoisers for value in values):
                    found.add(node.targets[0].id)
        return tuple(sorted(found))

    def is_denoiser(self, name: str) -> bool:
        """Whether a call of that dotted name in `__call__` is one of a denoiser."""
        return name in self.denoisers or name in self.aliases

    # -- the loop --------------------------------------------------------------------------------------------------

    def _steppers(self) -> set[str]:
        """Names of methods that call a denoiser or step the scheduler, themselves or through others."""
        found: set[str] = set()
        while True:
            more = {
                name
                for name, method in vars_of(self.cls).items()
                if name not in found and name != "__call__" and self._is_step(tree_of(method), found)
            }
            if not more:
                return found
            found |= more

    def _is_step(self, node: ast.AST, steppers: set[str]) -> bool:
        names = {name for name, _ in calls(node)}
        return any(
            self.is_denoiser(name) or name.endswith("scheduler.step") or name.removeprefix("self.") in steppers
            for name in names
        )

    def _find_loops(self) -> list[ast.AST]:
        """The loops of `__call__` in which the model is evaluated: outermost ones only."""
        found: list[ast.AST] = []

        def visit(node: ast.AST) -> None:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.For | ast.While) and self._is_step(child, self.steppers):
                    found.append(child)
                else:
                    visit(child)

        visit(tree_of(self.call))
        return found

    def place(self, node: ast.AST) -> Place:
        """Where a node of `__call__` stands."""
        line = getattr(node, "lineno", 0)
        for loop in self.loops:
            if loop.lineno <= line <= (loop.end_lineno or line):  # type: ignore[attr-defined]
                return "loop"
        ends = [loop.end_lineno for loop in self.loops]  # type: ignore[attr-defined]
        return "after" if ends and line > max(ends) else "before"

    # -- what is reached -------------------------------------------------------------------------------------------

    def _follow(self, function: Callable[..., Any], place: Place) -> None:
        top = function is self.call
        for name, node in calls(tree_of(function)):
            target = self._target(function, name)
            if target is None or target is self.call:
                continue
            here = self.place(node) if top else place
            entry = self.reached.setdefault(target.__qualname__, Reached(target.__qualname__, target))
            if here not in entry.places:
                entry.places.add(here)
                self._follow(target, here)

    def _target(self, function: Callable[..., Any], name: str) -> Callable[..., Any] | None:
        """The pipeline's own method or helper of that dotted name."""
        if name.startswith("self.") and name.count(".") == 1:
            found = inspect.getattr_static(self.cls, name[5:], None)
        elif name and "." not in name:
            found = getattr(function, "__globals__", {}).get(name)
        else:
            return None
        found = found.__func__ if isinstance(found, staticmethod | classmethod) else found
        found = inspect.unwrap(found) if callable(found) else None
        return found if inspect.isfunction(found) and is_own(found.__module__) else None

    def component_calls(self, components: set[str]) -> Iterator[tuple[Place, str, Statement]]:
        """(place, component, statement) for every call of a component or of one of its methods."""
        functions = [(self.call, None)] + [(r.function, r.places) for r in self.reached.values()]
        for function, places in functions:
            for statement, name, node in self._statements(function):
                parts = name.split(".")
                if parts[0] == "self" and len(parts) > 1 and parts[1] in components:
                    for place in sorted(places) if places is not None else [self.place(node)]:
                        yield place, parts[1], Statement(function, statement, name)

    def loop_statements(self) -> Iterator[Statement]:
        """Every call in the loop, with the innermost statement that it stands in."""
        for statement, name, node in self._statements(self.call):
            if self.place(node) == "loop":
                yield Statement(self.call, statement, name)

    def _statements(self, function: Callable[..., Any]) -> Iterator[tuple[ast.stmt, str, ast.Call]]:
        def visit(node: ast.AST, inner: ast.stmt | None) -> Iterator[tuple[ast.stmt, str, ast.Call]]:
            for child in ast.iter_child_nodes(node):
                simple = isinstance(child, ast.stmt) and not hasattr(child, "body")
                if isinstance(child, ast.Call) and inner is not None:
                    yield inner, dotted(child.func), child
                yield from visit(child, child if simple else inner)  # type: ignore[arg-type]

        yield from visit(tree_of(function), None)


def is_own(module: str) -> bool:
    """Whether what `module` holds is the pipeline's own, and neither a library's nor shared by all pipelines."""
    if module.startswith(INFRASTRUCTURE):
        return False
    return module.startswith("diffusers.") or not _installed(module)


@cache
def _installed(module: str) -> bool:
    """Whether `module` is a library's: of the standard library, or below site-packages."""
    if module.partition(".")[0] in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return "site-packages" in file


def vars_of(cls: type) -> dict[str, Callable[..., Any]]:
    """Name -> function of the methods of `cls` and its own bases, not those that every pipeline has."""
    found: dict[str, Callable[..., Any]] = {}
    for base in cls.__mro__:
        if not is_own(base.__module__):
            continue
        for name, value in vars(base).items():
            function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            function = inspect.unwrap(function) if callable(function) else None
            if inspect.isfunction(function):
                found.setdefault(name, function)
    return found
