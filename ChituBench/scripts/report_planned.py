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
    "+ correction, weights for no drift": "correction, weights that count no drift",
    "+ the best of the candidates": "**the planned cache**, drift by the rule",
    "+ correction of 4": "correction of 4 predictions",
    "+ one step more, two by the conditional branch alone": "one step more, at the last two only the conditional branch",
    "+ one step more, two by the unconditional branch alone": "one step more, at the third and fourth only the unconditional branch",
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
    return f"""## The planned cache, part by part

Embedded model, guidance 3, float32, {data["machine"]}, torch {data["torch"]}, diffusers {data["diffusers"]}; calibrated with \
{prompts["calibration"]} prompts, drawn with {prompts["test"]} others × {len(prompts["seeds"])} seeds \
([data](results/planned_ablation.json), with intervals and more rows).

```
{commands}
```

{chr(10).join(lines)}

The mean over pictures, and the worst of them. Here drift is counted by the rule; the product has it measured, and is in the tables above. Not in the plan: computing
one branch of guidance alone at some steps ([why](../docs/negative-results.md#the-planned-cache)); a correction of four predictions, which costs a third tensor; local search by true errors; weights of their own for each of three bands of spatial frequency ({_ideas(data, "bands")} dB foretold
against the plan) and schedules of their own for the two branches of guidance ({_ideas(data, "split")} dB). Local search by the foretold error does pay, now that it counts drift, and is not in the plan yet. The oracles plan from the very run that they
are to draw, and show what is left to gain with sums of two or three earlier predictions."""


def _cell(row: dict[str, Any] | None) -> str:
    return f"{row['psnr']:.1f} ({row['worst']:.1f})" if row else ""


def _ideas(data: dict[str, Any], name: str) -> str:
    """From the least to the most that an idea changes the foretold error, in dB."""
    gains = [row[name] - row["planned"] for row in data["not_taken"]]
    return f"{min(gains):+.1f} to {max(gains):+.1f}"
