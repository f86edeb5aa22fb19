"""Every cache on every row: what came of it, one cell a strategy."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Collection
from typing import Any

from caches import ACTS, fitting, ready
from snapshot import snapshot

from chitu_diffusion import patch
from chitu_diffusion.flexcache import Params
from chitu_diffusion.flexcache.params import PARAMS
from chitu_hooks import ChituError

from .modes import Cell, Trial, left_behind, skipped
from .table import Model

STEPS = 8
STRATEGIES: dict[str, Params] = {name: ACTS[name] for name in PARAMS}
"""Strategy -> settings at which it has to skip."""


def outcomes(row: Model, names: Collection[str] = tuple(STRATEGIES)) -> dict[str, Cell]:
    """A cell for every strategy in `names`."""
    trial = Trial(row, STEPS)
    with patch(trial.pipe) as handle:
        blocks = [sum(len(s.blocks) for s in d.stacks if not s.refiner) for d in handle.sites.denoisers]
    return {name: outcome(trial, name, fitting(name, STRATEGIES[name], min(blocks))) for name in names}


def outcome(trial: Trial, name: str, params: Params) -> Cell:
    """The cell of strategy `name`; what Chitu refuses is told in its own words."""
    before = snapshot(trial.pipe, ran=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with patch(trial.pipe, cache=ready(trial.pipe, params)) as handle:
                out = trial.run()
                report = handle.report()
            declined = [note for note in report.notes if note.startswith(f"{name}: ")]
            cell = skipped(trial, name, out, report)
            if declined and not hits(report, name):
                cell = Cell("refused", f"nothing was skipped; {declined[0]}")
        except ChituError as error:
            cell = Cell("refused", str(error))
    return left_behind(trial, before) or cell


def hits(report: Any, name: str) -> int:
    return next(feature for feature in report.features if feature["name"] == name)["hits"]


def summary(name: str) -> str:
    """What the strategy does, and the settings that it is run with."""
    params = STRATEGIES[name]
    first = (type(params).__doc__ or "").strip().split("\n\n")[0]
    given = {
        field.name: getattr(params, field.name)
        for field in dataclasses.fields(params)
        if getattr(params, field.name) != field.default
    }
    return f"{' '.join(first.split())} `{', '.join(f'{key}={value}' for key, value in given.items())}`"
