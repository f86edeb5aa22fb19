"""Pictures of stored results of `chitu bench parallel`: scaling with the ideal line, and time per stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .attention_plot import HATCHES, OKABE_ITO
from .files import write_whole
from .flexcache_plot import MARKERS
from .parallel_tables import timed, title
from .tables import groups

STAGES = ("encode", "denoise", "exchange", "decode")


def plot(summary: dict[str, Any], folder: Path, name: str = "parallel_bench") -> list[Path]:
    """Two pictures, with a panel for each baseline that has something measured on several processes; their paths."""
    import matplotlib

    matplotlib.use("Agg")
    found = [(baseline, timed(cases)) for baseline, cases in groups(summary)]
    found = [(baseline, cases) for baseline, cases in found if any(case["case"]["ranks"] > 1 for case in cases)]
    if not found:
        return []
    made = []
    for ending, draw in (("scaling", _scaling), ("stages", _stages)):
        path, figure = folder / f"{name}_{ending}.png", draw(found)
        write_whole(path, lambda half, figure=figure: figure.savefig(half, dpi=140, format="png"))  # type: ignore[misc]
        made.append(path)
    return made


def _scaling(found: list[tuple[dict[str, Any], list[dict[str, Any]]]]) -> Any:
    """Speed-up of a step over the fastest single process, by number of processes; a line where a mode has several."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.6 * len(found)), layout="constrained")
    for axes, (baseline, cases) in zip(figure.subplots(len(found), 1, squeeze=False)[:, 0], found):
        most = max(case["case"]["ranks"] for case in cases)
        axes.plot([1, most], [1, most], color="#666666", linestyle=(0, (4, 2)), linewidth=1.2, label="ideal")
        families: dict[str, list[dict[str, Any]]] = {}
        for case in cases:
            families.setdefault(family(case), []).append(case)
        colours = [colour for colour in OKABE_ITO if colour != "#F0E442"]
        for number, (name, members) in enumerate(families.items()):
            peer = case_is_peer(members[0])
            single = members[0]["case"]["ranks"] == 1
            shift = 1 if single else 1 + 0.016 * (number - len(families) / 2)  # beside one another
            axes.errorbar(
                [case["case"]["ranks"] * shift for case in members],
                [case["timing"]["speedup"]["step"]["median"] for case in members],
                yerr=_bars([case["timing"]["speedup"]["step"] for case in members]),
                label=name,
                marker=MARKERS[number % len(MARKERS)],
                color=colours[number % len(colours)],
                markerfacecolor="white" if peer else None,
                linestyle=(0, (1, 1.4)) if peer else "solid",
                markersize=7,
                capsize=2,
            )
        axes.set_xscale("log", base=2)
        ticks = sorted({case["case"]["ranks"] for case in cases} | {1})
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_xlim(0.88, most * 1.14)
        axes.set_ylim(bottom=0)
        axes.minorticks_off()
        axes.set_xlabel("processes for one picture")
        axes.set_ylabel("speed-up of a step over\nthe fastest single process")
        axes.set_title(title(baseline), fontsize=11, loc="left")
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=9, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _bars(speeds: list[dict[str, Any]]) -> list[list[float]]:
    return [[s["median"] - s["least"] for s in speeds], [s["most"] - s["median"] for s in speeds]]


def family(case: dict[str, Any]) -> str:
    """What stays of a mode when its degrees grow with the number of processes."""
    mode = case["case"]
    if mode["ranks"] == 1:
        return mode["name"]
    names = " × ".join(name.removesuffix("_degree") for name in mode["degrees"])
    return f"diffusers {names}" if case_is_peer(case) else names


def case_is_peer(case: dict[str, Any]) -> bool:
    return case["case"]["maker"] != "chitu"


def _stages(found: list[tuple[dict[str, Any], list[dict[str, Any]]]]) -> Any:
    """One bar a mode, in parts; what ranks spend on exchanges is taken out of denoising."""
    from matplotlib.figure import Figure

    rows = [len(cases) for _, cases in found]
    figure = Figure(figsize=(10, 1.0 * len(found) + 0.36 * sum(rows) + 0.5), layout="constrained")
    panels = figure.subplots(len(found), 1, squeeze=False, height_ratios=[n + 2 for n in rows])[:, 0]
    for axes, (baseline, cases) in zip(panels, found):
        left = [0.0] * len(cases)
        for number, stage in enumerate(STAGES):
            values = [stages_of(case)[stage] for case in cases]
            axes.barh(
                range(len(cases)), values, 0.72, left=left, label=stage, color=OKABE_ITO[(0, 4, 1, 2)[number]],
                hatch=HATCHES[number], edgecolor="white", linewidth=0.5,
            )  # fmt: skip
            left = [a + b for a, b in zip(left, values)]
        for row, total in enumerate(left):
            axes.text(total, row, f" {total:.2f} s", va="center", fontsize=9)
        axes.set_yticks(range(len(cases)), [_label(case) for case in cases], fontsize=9)
        axes.invert_yaxis()
        axes.set_xlim(right=1.1 * max(left))
        axes.set_title(title(baseline), fontsize=11, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("seconds of one picture (medians)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(STAGES), fontsize=10, frameon=False)
    return figure


def _label(case: dict[str, Any]) -> str:
    ranks = case["case"]["ranks"]
    return case["case"]["name"] if ranks == 1 else f"{case['case']['name']} ({ranks} processes)"


def stages_of(case: dict[str, Any]) -> dict[str, float]:
    """Seconds of each of `STAGES`; they add up to the picture's."""
    seconds = {stage: numbers["median"] for stage, numbers in case["timing"]["seconds"].items()}
    exchange = min(case["timing"]["exchange"], seconds["denoise"])
    return {
        "encode": seconds["encode"],
        "denoise": seconds["denoise"] - exchange,
        "exchange": exchange,
        "decode": seconds["decode"],
    }
