"""Cases: what a bench runs beside the baseline, read from YAML and checked before anything is loaded.

A file holds a list of entries; an entry is one case, or several where it has `vary`::

    steps: [28, 50]                # scheduler steps of the baselines; an entry may have its own
    cases:
      - family: fbcache            # one curve in the picture, one group in the table
        kind: chitu                # see `kinds.KINDS`; chitu if left out
        use: fbcache               # the strategy, or the peer's name for its cache
        params: {front: 1}
        vary: {threshold: [0.1, 0.2, 0.4]}
        quick: true                # also part of a quick bench
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from chitu_hooks import ChituError
from chitu_hooks.errors import nearest

from .errors import BenchError
from .files import data_folder

TOP = ("steps", "cases")
KEYS = ("family", "kind", "use", "params", "vary", "steps", "quick")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One setting, at one number of steps."""

    kind: str
    """A key of `kinds.KINDS`."""
    use: str
    """Strategy of ours, or cache of the peer; empty for the free baselines."""
    params: dict[str, Any] = field(default_factory=dict)
    steps: int
    """Scheduler steps of the baseline that it is compared with."""
    family: str
    quick: bool = False

    @property
    def label(self) -> str:
        """Name for tables: what is on, and the parameters that were given."""
        own = ", ".join(f"{key}={_short(value)}" for key, value in self.params.items())
        name = self.use or self.kind
        prefix = "" if self.kind == "chitu" or not self.use else f"{self.kind} "
        return f"{prefix}{name} {own}".strip()

    def content(self) -> dict[str, Any]:
        """What the result depends on: `family` and `quick` are for presentation."""
        return {"kind": self.kind, "use": self.use, "params": self.params, "steps": self.steps}

    def to_json(self) -> dict[str, Any]:
        return {**self.content(), "family": self.family, "label": self.label}


def _short(value: Any) -> str:
    return f"{len(value)} values" if isinstance(value, (list, tuple)) and len(value) > 8 else str(value)


def default_cases() -> Path:
    """The shipped case file."""
    return data_folder() / "cases" / "flexcache.yaml"


def load_cases(path: Path) -> list[Case]:
    """Every case of the file at `path`, each checked as far as it can be without a model.

    Raises:
        BenchError: the file cannot be read, has an unknown key or an impossible value; it names the entry.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError(f"--cases {str(path)!r} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise BenchError(f"--cases {str(path)!r} is no YAML: {' '.join(str(error).split())}") from None
    where = f"--cases {str(path)!r}"
    if not isinstance(data, dict) or not isinstance(data.get("cases"), list) or not data["cases"]:
        raise BenchError(f"{where} is to hold `cases`, a list with at least one entry")
    _known(where, data, TOP)
    steps = _steps(where, data.get("steps", 28))
    cases: list[Case] = []
    for number, entry in enumerate(data["cases"], 1):
        cases += _entry(f"{where}, case {number}", entry, steps)
    return _unique(where, cases)


def _entry(where: str, entry: Any, steps: list[int]) -> Iterator[Case]:
    from .kinds import KINDS

    if not isinstance(entry, dict):
        raise BenchError(f"{where} is a mapping with {', '.join(KEYS)}, not {entry!r}")
    _known(where, entry, KEYS)
    kind, use = entry.get("kind", "chitu"), entry.get("use", "")
    if kind not in KINDS:
        raise BenchError(f"{where}: no kind {kind!r}{nearest(str(kind), KINDS)}")
    if not isinstance(use, str):
        raise BenchError(f"{where}: use is a name, not {use!r}")
    params, vary = entry.get("params") or {}, entry.get("vary") or {}
    for name, value in (("params", params), ("vary", vary)):
        if not isinstance(value, dict):
            raise BenchError(f"{where}: {name} is a mapping, not {value!r}")
        for key in value:
            if not isinstance(key, str):
                raise BenchError(
                    f"{where}: {name} names parameters, and YAML reads {key!r} as a {type(key).__name__}; quote it"
                )
    for key, values in vary.items():
        if not isinstance(values, list) or not values or key in params:
            raise BenchError(f"{where}: vary {key} is a list of values for a parameter that params does not have")
    own_steps = _steps(where, entry["steps"]) if "steps" in entry else steps
    for count in own_steps:
        for values in itertools.product(*vary.values()):
            case = Case(
                kind=kind,
                use=use,
                params={**params, **dict(zip(vary, values))},
                steps=count,
                family=str(entry.get("family") or (f"{kind} {use}" if kind != "chitu" and use else use or kind)),
                quick=entry.get("quick", False) is True,
            )
            try:
                KINDS[kind].check(case)
            except ChituError as error:
                raise BenchError(f"{where}: {error}") from None
            yield case


def _known(where: str, mapping: dict[str, Any], known: tuple[str, ...]) -> None:
    for key in mapping:
        if key not in known:
            raise BenchError(f"{where}: unknown key {key!r}{nearest(str(key), known)}")


def _steps(where: str, value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(v, int) and not isinstance(v, bool) and v > 0 for v in values):
        raise BenchError(f"{where}: steps are whole numbers from 1, not {value!r}")
    return values


def _unique(where: str, cases: list[Case]) -> list[Case]:
    seen: dict[str, Case] = {}
    for case in cases:
        if repr(case.content()) in seen:
            raise BenchError(f"{where}: {case.label} at {case.steps} steps is there twice")
        seen[repr(case.content())] = case
    return cases
