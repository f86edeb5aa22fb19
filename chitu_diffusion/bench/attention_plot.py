"""Pictures of a stored attention bench: TFLOP/s by kernel and shape, and milliseconds of a FLUX step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

OKABE_ITO = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#F0E442",
    "#000000",
    "#999999",
    "#882255",
)
"""Colours that also those tell apart who do not see red and green."""
HATCHES = ("", "//", "..", "xx", "\\\\", "++", "oo", "--", "||", "**")


def plot(stored: Path, folder: Path) -> list[Path]:
    """Draw from the JSON at `stored` into `folder`; the paths of the pictures."""
    import matplotlib

    matplotlib.use("Agg")
    data = json.loads(stored.read_text())
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for name, rows, draw in (
        ("attention_kernels.png", data.get("shapes"), _kernels),
        ("attention_steps.png", data.get("steps"), _steps),
    ):
        if rows:
            figure = draw(rows, _where(data))
            figure.savefig(folder / name, dpi=150)
            made.append(folder / name)
    return made


def _where(data: dict[str, Any]) -> str:
    machine, versions = data["machine"], data["versions"]
    return f"{machine.get('gpu') or machine.get('cpu')}, torch {versions.get('torch')}"


def _kernels(rows: list[dict[str, Any]], where: str) -> Any:
    """Groups of bars: one group a shape, one bar a kernel, each with its number."""
    from matplotlib.figure import Figure

    best: dict[str, float] = {}
    for row in rows:
        for kernel, numbers in row["kernels"].items():
            best[kernel] = max(best.get(kernel, 0.0), numbers["tflops"])
    names = sorted(best, key=lambda kernel: -best[kernel])[: len(OKABE_ITO)]
    figure = Figure(figsize=(10, 0.9 + 0.26 * len(rows) * (len(names) + 1)), layout="constrained")
    axes = figure.add_subplot()
    for i, kernel in enumerate(names):
        places = [row * (len(names) + 1) + i for row in range(len(rows))]
        values = [row["kernels"].get(kernel, {}).get("tflops", 0.0) for row in rows]
        bars = axes.barh(
            places, values, 0.9, color=OKABE_ITO[i], hatch=HATCHES[i], edgecolor="white", linewidth=0, label=kernel
        )
        axes.bar_label(bars, [f"{value:.3g}" if value else "" for value in values], padding=3, fontsize=8)
    middle = (len(names) - 1) / 2
    labels = [f"{row['shape']}\n{row['B']}×{row['H']}×{row['S']}×{row['D']}" for row in rows]
    axes.set_yticks([row * (len(names) + 1) + middle for row in range(len(rows))], labels)
    axes.invert_yaxis()
    axes.set_xlabel("TFLOP/s (median), bfloat16, no mask; batch × heads × tokens × head dim")
    axes.set_title(f"Attention kernels, {where}", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", fontsize=8, frameon=False)
    return figure


def _steps(rows: list[dict[str, Any]], where: str) -> Any:
    """One panel for eager and one for compiled: a bar a candidate, whiskers between the quartiles."""
    from matplotlib.figure import Figure

    tallest = max(len(row["candidates"]) for row in rows)
    figure = Figure(figsize=(10, 1.2 + 0.4 * tallest), layout="constrained")
    panels = figure.subplots(1, len(rows), squeeze=False)[0]
    for axes, row in zip(panels, rows):
        names = list(row["candidates"])
        found = [row["candidates"][name] for name in names]
        medians = [numbers["median_ms"] for numbers in found]
        spread = [
            [m - numbers["quartiles_ms"][0] for m, numbers in zip(medians, found)],
            [numbers["quartiles_ms"][1] - m for m, numbers in zip(medians, found)],
        ]
        spread = [[max(0.0, value) for value in side] for side in spread]
        colours = [OKABE_ITO[0] if not name.startswith(("stock", "diffusers")) else "#999999" for name in names]
        bars = axes.barh(names, medians, 0.7, color=colours, xerr=spread, error_kw={"elinewidth": 1, "capsize": 2})
        axes.bar_label(bars, [f"{value:.4g}" for value in medians], padding=5, fontsize=8)
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.set_xlabel("ms a step (median, quartiles)")
        axes.set_title(row["mode"], fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"FLUX.1-dev shape, random weights, 4096 + 512 tokens: {where}", fontsize=10)
    return figure
