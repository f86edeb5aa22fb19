"""The section of `result.md` about model shapes with random weights, and its picture."""

# ruff: noqa: E501 - the lines of the page are as they are on the page

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from chitu_diffusion.bench.attention_plot import HATCHES, OKABE_ITO
from chitu_diffusion.bench.files import write_whole

STOCK, OURS = "stock", 'attention="auto"'
SETTINGS = {
    ("eager", STOCK): "stock, eager",
    ("eager", OURS): "ours, eager",
    ("compiled", STOCK): "stock, compiled",
    ("compiled", OURS): "ours, compiled",
}
MARKS = "osD^"


def measured(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The models that were timed."""
    return {name: row for name, row in data["models"].items() if "ms" in row.get("eager", {}).get(STOCK, {})}


def section(data: dict[str, Any] | None) -> str:
    """The section; nothing without data."""
    if data is None or not measured(data):
        return ""
    models = measured(data)
    versions = data["versions"]
    gpu = data["machine"].get("gpu") or "CPU"
    return f"""## Model shapes, random weights

**Speed only**: weights are random, so there is no picture to compare. One {gpu}, bfloat16, batch 1; torch {versions["torch"]}, diffusers {versions["diffusers"]}\
{f", cache-dit {versions['cache-dit']}" if "cache-dit" in versions else ""}. A step has two calls of the denoiser, or one of batch two, where there is guidance.

`python ChituBench/scripts/{data["command"]}` ([data](results/model_shapes.json), commit {data["commit"]})

![milliseconds a step, and what caches gain, for each model](plots/model_shapes.png)

| ms a step | {" | ".join(SETTINGS.values())} | floor | share of it |
|{"---|" * (3 + len(SETTINGS))}
{chr(10).join(_steps(row, data) for row in models.values())}

*Floor*: the FLOPs of a step at the {data["matmul_tflops"]:.0f} TFLOP/s that this GPU reached in a large matrix product in the same run; *share*: floor over the fastest step.

| denoising, speed-up over stock in the same mode (ms of a skipped step) | {" | ".join(row["title"] for row in models.values())} |
|{"---|" * (1 + len(models))}
{chr(10).join(_cache_rows(models))}

Each cache was made to skip every second step whatever the data, so all do the same amount of work but `blockdance` and `pab`, which always compute a part of
each step; speed-ups are over stock without `attention="auto"`, of the whole denoising of {", ".join(f"{row['steps']}" for row in models.values())} steps. Peers are timed with \
compiled blocks where they run so, else eager against stock eager, and of their skipped steps the cheapest step is shown.{_left_out(data)}"""


def _steps(row: dict[str, Any], data: dict[str, Any]) -> str:
    values = {key: row[key[0]].get(key[1], {}).get("ms") for key in SETTINGS}
    known = [value for value in values.values() if value]
    floor = floor_ms(row, data)
    cells = [f"{value:.1f}" if value else "" for value in values.values()]
    cells = [f"**{cell}**" if value == min(known) else cell for cell, value in zip(cells, values.values())]
    cells += [f"{floor:.1f}", f"{100 * floor / min(known):.0f} %"] if floor else ["", ""]
    return f"| {row['title']} | {' | '.join(cells)} |"


def floor_ms(row: dict[str, Any], data: dict[str, Any]) -> float | None:
    """Milliseconds of a step at the speed of a large matrix product; None where FLOPs could not be counted."""
    flops = row.get("flops_step")
    return flops / data["matmul_tflops"] / 1e9 if isinstance(flops, (int, float)) else None


def gains(row: dict[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Cache -> the mode that it ran in, and its numbers."""
    found = {}
    for mode in ("compiled", "eager"):
        for name, numbers in row[mode].items():
            if not name.startswith((STOCK, OURS)) and "speedup" in numbers:
                found.setdefault(name, (mode, numbers))
    return found


def _cache_rows(models: dict[str, dict[str, Any]]) -> list[str]:
    names = dict.fromkeys(name for row in models.values() for mode in ("compiled", "eager") for name in row[mode])
    lines = []
    for name in names:
        if name.startswith((STOCK, OURS)):
            continue
        lines.append(f"| {_label(name)} | {' | '.join(_gain(row, name) for row in models.values())} |")
    return lines


def _label(name: str) -> str:
    return name if " " in name else f"`{name}`"


def _gain(row: dict[str, Any], name: str) -> str:
    found = gains(row).get(name)
    if found is None:
        numbers = row["eager"].get(name) or row["compiled"].get(name)
        return "" if numbers is None else "fails"
    mode, numbers = found
    skipped = numbers["skipped_ms"] or (numbers["ms_low"] if " " in name else None)
    text = f"{numbers['speedup']:.2f}×" + (f" ({skipped:.2f})" if skipped else "")
    return text + (", eager" if mode == "eager" else "")


def _left_out(data: dict[str, Any]) -> str:
    """Which caches no model had time for; what only some had time for is an empty cell."""
    if not data["left_out"]:
        return ""
    shown = {name for row in data["models"].values() for name in {**row["eager"], **row["compiled"]}}
    left = dict.fromkeys(re.split(r"(?:eager|compiled), ", what.split(":")[0])[-1] for what in data["left_out"])
    without = [f"`{name}`" for name in left if name not in shown]
    rows = f", nor was there any for {', '.join(without)}" if without else ""
    return f" For empty cells there was no time in this run{rows}."


def plot(data: dict[str, Any], path: Path) -> Path:
    """Bars of milliseconds a step, and under them what each cache gains."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    models = measured(data)
    names = list(dict.fromkeys(name for row in models.values() for name in gains(row)))
    heights = [0.55 + 0.3 * len(models) * (len(SETTINGS) + 1), 0.9 + 0.34 * len(names)]
    figure = Figure(figsize=(10, sum(heights) + 0.6), layout="constrained")
    top, bottom = figure.subplots(2, 1, height_ratios=heights)
    _bars(top, models)
    for number, row in enumerate(models.values()):
        found = gains(row)
        places = [i + 0.16 * (number - (len(models) - 1) / 2) for i, name in enumerate(names) if name in found]
        values = [found[name][1]["speedup"] for name in names if name in found]
        bottom.scatter(
            values, places, 55, color=OKABE_ITO[number], marker=MARKS[number % 4], label=row["title"], zorder=3
        )
    bottom.axvline(1, color="#666666", linewidth=1)
    bottom.axvline(2, color="#666666", linewidth=1, linestyle=(0, (4, 2)))
    bottom.set_yticks(range(len(names)), names)
    bottom.invert_yaxis()
    bottom.set_xlabel("speed-up of denoising over stock in the same mode; every second step skipped, dashed: 2×")
    bottom.grid(axis="y", alpha=0.25, linewidth=0.6)
    bottom.legend(fontsize=9, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
    top.set_title(
        f"Random weights, speed only: {data['machine'].get('gpu') or 'CPU'}, torch {data['versions']['torch']}",
        fontsize=11,
        loc="left",
    )
    write_whole(path, lambda half: figure.savefig(half, dpi=140, format="png"))
    return path


def _bars(axes: Any, models: dict[str, dict[str, Any]]) -> None:
    width = len(SETTINGS) + 1
    for number, ((mode, name), label) in enumerate(SETTINGS.items()):
        values = [row[mode].get(name, {}).get("ms") or 0.0 for row in models.values()]
        places = [row * width + number for row in range(len(models))]
        colour = OKABE_ITO[(4, 0)[name == OURS]]
        bars = axes.barh(
            places,
            values,
            0.85,
            label=label,
            color=colour,
            hatch=HATCHES[1] if mode == "eager" else "",
            edgecolor="white",
            linewidth=0,
        )
        axes.bar_label(bars, [f"{value:.1f}" if value else "" for value in values], padding=3, fontsize=8)
    axes.set_yticks(
        [row * width + (len(SETTINGS) - 1) / 2 for row in range(len(models))], [row["title"] for row in models.values()]
    )
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds a step (median)")
    axes.legend(fontsize=9, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
