"""The matrix as data and as a page."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

import diffusers

from chitu_diffusion import patch

from . import strategies
from .modes import MODES, Cell, Trial, outcome
from .strategies import STRATEGIES
from .table import NOT_BUILT, Model, models, transformer_classes, variations

COMMAND = "python tests/matrix --write"


def row(model: Model) -> dict[str, Any]:
    """One row: what names it, which hook map it uses, and a cell for each mode."""
    trial = Trial(model)
    with patch(trial.pipe) as handle:
        found = handle.hook_map
    cells = {mode: outcome(mode, trial) for mode in MODES}
    return {
        **model.named(),
        "hook map": found.name if found.source == "registry" else found.source,
        "modes": {mode: _data(cell) for mode, cell in cells.items()},
    }


def caches(model: Model, names: Collection[str] = tuple(STRATEGIES)) -> dict[str, dict[str, str]]:
    """A cell for each strategy in `names`."""
    return {name: _data(cell) for name, cell in strategies.outcomes(model, names).items()}


def _data(cell: Cell) -> dict[str, str]:
    return {"state": cell.state, "note": cell.note}


def matrix(published: dict[str, Any], only: Collection[str] = ()) -> dict[str, Any]:
    """All rows.

    Args:
        published: what is taken from where nothing is made anew: variants that need a package which is not installed.
        only: names of rows and of strategies to make anew; nothing else is then. Empty: everything is.
    """
    return {
        "diffusers": diffusers.__version__,
        "modes": {mode: summary(mode) for mode in MODES},
        "strategies": {name: strategies.summary(name) for name in STRATEGIES},
        "models": [line(model, published["models"], only) for model in models()],
        "variants": [line(model, published["variants"], only) for model in variations()],
        "scoped out": {name: NOT_BUILT[name] for name in transformer_classes() if name in NOT_BUILT},
    }


def line(model: Model, published: list[dict[str, Any]], only: Collection[str]) -> dict[str, Any]:
    """The row of `model`: made anew, or what is published of it, with some strategies made anew."""
    known = next((line for line in published if model.named().items() <= line.items()), None)
    if known is not None and getattr(model, "lacks", None):
        missing = [name for name in STRATEGIES if name not in known["strategies"]]
        if missing:
            raise SystemExit(
                f"{model.named()} has no cell for {missing} and needs {model.lacks}, which is not installed"
            )
        return known
    if known is None or not only or set(only) & set(model.named().values()):
        return {**row(model), "strategies": caches(model)}
    wanted = [name for name in STRATEGIES if name in only]
    cells = {**known["strategies"], **(caches(model, wanted) if wanted else {})}
    return {**known, "strategies": {name: cells[name] for name in STRATEGIES}}


def summary(mode: str) -> str:
    """The sentence that says what is tried in `mode`."""
    return " ".join((MODES[mode].__doc__ or "").split())


def as_json(found: dict[str, Any]) -> str:
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def as_page(found: dict[str, Any]) -> str:
    """`docs/models.md`."""
    runs = [line["run as"] for line in found["models"]]
    driven = runs.count("driven transformer")
    classes = {line["transformer"] for line in found["models"]}
    return f"""# Models

Made by `{COMMAND}` from diffusers {found["diffusers"]}; not written by hand. The same as data: [models.json](models.json).

diffusers has {len(classes) + len(found["scoped out"])} transformer classes; {len(classes)} of them were run, at a tiny size \
with random weights on the CPU: {len(runs) - driven} rows in a whole pipeline of diffusers without text encoders, {driven} \
as a *driven transformer*, which is called by the smallest pipeline object that denoises, with a scheduler of diffusers and \
two guidance branches. Speed and pictures are not what this page is about.

Each cell is *works*, *refused* with the reason, or *scoped out* with the reason. A *hook map* is the name of the adapter, or \
*inferred* where nothing had to be written.

{summaries(found["modes"])}

{table(["transformer", "run as", "hook map"], found["models"], "modes")}

## Caches

Each strategy at settings at which it has to skip, \
in {strategies.STEPS} steps: *works* says that it did, that the output is finite and \
another one, and that undoing it leaves every object as it was. *refused* is an error, or the reason that the report of a \
run without any skip gives. Whether a picture is still good at a setting is a question for real weights.

{summaries(found["strategies"])}

{table(["transformer", "run as"], found["models"], "strategies")}

## Variants

Other ways to call a pipeline: each is run with what makes the variant switched on.

{table(["variant", "hook map"], found["variants"], "modes")}

{table(["variant"], found["variants"], "strategies")}

## Scoped out

{chr(10).join(f"- `{name}`: {why}." for name, why in found["scoped out"].items())}
"""


def summaries(columns: dict[str, str]) -> str:
    return "\n".join(f"- **{column}**: {what}" for column, what in columns.items())


def table(named: list[str], lines: list[dict[str, Any]], kind: str) -> str:
    """A Markdown table: the cells that name a row, then a cell for each column of `kind`, modes or strategies."""
    columns = MODES if kind == "modes" else STRATEGIES
    head = [*named, *columns]
    body = [
        [*(_code(name, line[name]) for name in named), *(_shown(line[kind][column]) for column in columns)]
        for line in lines
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *body])


def _code(name: str, value: str) -> str:
    return f"`{value}`" if name == "transformer" or value.endswith("Pipeline") else value


def _shown(cell: dict[str, str]) -> str:
    text = str(Cell(cell["state"], cell["note"])).replace("|", "\\|").replace("*.", "N.")
    return re.sub(r"((?:\w+\.)+\w+)", r"`\1`", text) if cell["state"] == "works" else text


def failures(found: dict[str, Any]) -> list[str]:
    """The cells that no published row may have."""
    return [
        f"{' '.join(str(value) for value in list(line.values())[:2])}, {mode}: {cell['note']}"
        for line in [*found["models"], *found["variants"]]
        for mode, cell in [*line["modes"].items(), *line["strategies"].items()]
        if cell["state"] == "fails"
    ]
