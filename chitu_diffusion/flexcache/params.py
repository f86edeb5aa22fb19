"""The parameters of every strategy: frozen, checked, and readable from the command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import yaml

from chitu_hooks import PatchError
from chitu_hooks.errors import nearest


@dataclass(frozen=True, kw_only=True)
class Params:
    """Base class: a strategy's parameters, named after it."""

    strategy: ClassVar[str] = ""


@dataclass(frozen=True, kw_only=True)
class Static(Params):
    """Compute the given steps; at the others skip the trunk and add the residual of the last computed step.

    Raises:
        PatchError: a step is negative or no whole number, or step 0 is missing.
    """

    strategy: ClassVar[str] = "static"

    steps: tuple[int, ...]
    """Schedule positions to compute, from 0; both stages of an order-2 step count as one position."""

    def __post_init__(self) -> None:
        steps = self.steps if isinstance(self.steps, (tuple, list, set, frozenset, range)) else (self.steps,)
        if not all(isinstance(step, int) and not isinstance(step, bool) and step >= 0 for step in steps):
            raise PatchError(f"static: steps are whole numbers from 0, not {self.steps!r}")
        if 0 not in steps:
            raise PatchError(f"static: step 0 has nothing to reuse; add 0 to steps={tuple(sorted(steps))}")
        object.__setattr__(self, "steps", tuple(sorted(set(steps))))


PARAMS: dict[str, type[Params]] = {cls.strategy: cls for cls in (Static,)}
"""Strategy name -> its parameters."""


def make_params(name: str, options: Mapping[str, Any] | None = None) -> Params:
    """The parameters of strategy `name` from words, as on the command line.

    Args:
        name: a key of `PARAMS`.
        options: field name -> value; text is read as YAML, and `0,1,2` is a list.

    Raises:
        PatchError: no such strategy or field, or a value out of range; the message has the nearest names.
    """
    cls = PARAMS.get(name)
    if cls is None:
        raise PatchError(f"no cache {name!r}{nearest(name, PARAMS)}")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    values = {}
    for key, value in (options or {}).items():
        if key not in fields:
            raise PatchError(f"{name} has no parameter {key!r}{nearest(key, fields)}")
        values[key] = _read(value) if isinstance(value, str) else value
    missing = [n for n, field in fields.items() if field.default is dataclasses.MISSING and n not in values]
    if missing:
        raise PatchError(
            f"{name} needs {missing[0]}: give {cls.__name__}({missing[0]}=…) in Python, or --cache-arg {missing[0]}=…"
        )
    return cls(**values)


def _read(text: str) -> Any:
    try:
        if "," in text:
            return tuple(yaml.safe_load(f"[{text.strip('[]()')}]"))
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise PatchError(f"{text!r} is not a value: {error}") from error
