"""The page's section on the parts of the planned cache, from `results/planned_ablation.json`."""

from __future__ import annotations

from typing import Any

# ruff: noqa: E501 - the lines of the page are as they are on the page

SHOWN = {
    "uniform, hold": "uniform, held (= a coarser Euler grid)",
    "growing, hold": "growing, held",
    "growing, linear": "growing, linear",
    "planned, hold, unsigned": "planned, held, absolute errors added up",
    "planned, hold": "planned, held",
    "planned, linear": "planned, linear",
    "planned, ridge": "planned, least squares of 2",
    "planned, ridge, growth": "+ errors that grow",
    "planned, ridge of 3, growth": "+ least squares of 3",
    "growing, corrected": "the correction on a growing schedule",
    "+ correction, growth 0, response 0": "correction, errors do not grow",
    "+ correction, line instead of ridge": "correction, linear forecast",
    "+ correction, each gap alone": "correction, weights of each gap alone",
    "+ the best of the candidates": "**the planned cache**",
    "+ correction of 4": "correction of 4 predictions",
    "+ local search on the prediction": "local search by the foretold error",
    "+ local search on true errors": "local search by true errors of 8 prompts",
    "oracle: each picture's own weights": "*oracle*: each picture's own weights",
    "oracle: each picture's own schedule and weights": "*oracle*: each picture's own schedule and weights",
}
"""Name of a row -> what the page calls it; rows that are not here are in the file only."""


def section(data: dict[str, Any] | None) -> str:
    """Nothing where no run is stored."""
    if data is None:
        return ""
    columns = list(dict.fromkeys((row["of"], row["budget"]) for row in data["rows"]))
    found = {(row["name"], row["of"], row["budget"]): row for row in data["rows"]}
    lines = [
        "| PSNR, dB (worst) | " + " | ".join(f"{budget} of {steps}" for steps, budget in columns) + " |",
        "|---|" + "---|" * len(columns),
    ]
    for name, title in SHOWN.items():
        rows = [found.get((name, *column)) for column in columns]
        lines.append(f"| {title} | " + " | ".join(_cell(row) for row in rows) + " |")
    prompts = data["prompts"]
    commands = "\n".join(data["commands"])
    since = "." if any(row["name"] == DRIFT for row in data["rows"]) else BEFORE_DRIFT
    return f"""## The planned cache, part by part

Embedded model, guidance 3, float32, {data["machine"]}, torch {data["torch"]}, diffusers {data["diffusers"]}; calibrated with \
{prompts["calibration"]} prompts, drawn with {prompts["test"]} others × {len(prompts["seeds"])} seeds \
([data](results/planned_ablation.json), with intervals and more rows).

```
{commands}
```

{chr(10).join(lines)}

The mean over pictures, and the worst of them. Not in the plan, since they do not pay: local search, by the foretold or by true errors; a correction of
four predictions, which costs a third tensor; weights of their own for each of three bands of spatial frequency ({_ideas(data, "bands")} dB foretold
against the plan) and schedules of their own for the two branches of guidance ({_ideas(data, "split")} dB). The oracles plan from the very run that they
are to draw, and show what is left to gain with sums of two or three earlier predictions{since}"""


DRIFT = "+ correction, weights for no drift"
"""A row of runs in which all other weights count drift."""
BEFORE_DRIFT = """ whose weights do not count drift.

The run is of before weights counted drift, which the planned cache does now ([what it is worth](../docs/planned-cache.md#how-it-works)): the row of the planned cache is not
today's, and the oracles, which do not count it either, are no bound of today's."""


def _cell(row: dict[str, Any] | None) -> str:
    return f"{row['psnr']:.1f} ({row['worst']:.1f})" if row else ""


def _ideas(data: dict[str, Any], name: str) -> str:
    """From the least to the most that an idea changes the foretold error, in dB."""
    gains = [row[name] - row["planned"] for row in data["not_taken"]]
    return f"{min(gains):+.1f} to {max(gains):+.1f}"
