"""Pictures of stored results: the trade-off of speed and quality, and a contact sheet."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .attention_plot import OKABE_ITO
from .equal_flops import EXACT
from .files import write_whole
from .kinds import OURS, PEERS
from .tables import complete, groups, label_of, pareto, psnr_of, speedup_of, title

MARKERS = "osD^vP*X<>hp"
LINES = {"free": (0, (4, 2)), "peer": (0, (1, 1.4)), "own": "solid"}


def plot(summary: dict[str, Any], folder: Path, name: str = "flexcache") -> list[Path]:
    """One picture for each machine and model: a panel for each number of steps; the paths."""
    import matplotlib

    matplotlib.use("Agg")
    made = []
    panels: dict[str, list[Any]] = {}
    for baseline, cases in groups(summary):
        if any(complete(case) and psnr_of(case)["mean"] < EXACT for case in cases):
            panels.setdefault(_place(baseline), []).append((baseline, cases))
    for number, group in enumerate(panels.values()):
        path = folder / f"{name}_tradeoff{f'_{number + 1}' if number else ''}.png"
        figure = _tradeoff(group)
        write_whole(path, lambda half, figure=figure: figure.savefig(half, dpi=140, format="png"))  # type: ignore[misc]
        made.append(path)
    return made


def _place(baseline: dict[str, Any]) -> str:
    content = {key: value for key, value in baseline["content"].items() if key != "steps"}
    return repr(sorted(content.items()))


def _tradeoff(group: list[tuple[dict[str, Any], list[dict[str, Any]]]]) -> Any:
    """Our caches on the left, what else there is on the right, over what the other side reaches; a row for each number of steps."""
    from matplotlib.figure import Figure

    made = {case["case"]["family"]: _maker(case) for _, cases in group for case in cases if complete(case)}
    sides = [side for side in SIDES if set(SIDES[side]) & set(made.values())]
    styles = {side: _styles({f: m for f, m in made.items() if m in SIDES[side]}) for side in sides}
    longest = max(len(style) for style in styles.values())
    figure = Figure(figsize=(7 * len(sides), 1 + 0.13 * longest + 4.6 * len(group)), layout="constrained")
    panels = figure.subplots(len(group), len(sides), squeeze=False, sharex=True, sharey="row")
    for row, (baseline, cases) in zip(panels, group):
        done = [case for case in cases if complete(case)]
        for axes, side in zip(row, sides):
            _panel(axes, done, styles[side], side)
        row[0].set_title(title(baseline), fontsize=13, loc="left")
        row[0].set_ylabel("PSNR to the baseline, dB\n(mean; bar: 95 % interval)", fontsize=12)
    for axes in panels[-1]:
        axes.set_xlabel("speed-up of denoising (median; bar: least to most), log scale", fontsize=12)
    for number, side in enumerate(sides):
        _legend(figure, panels[:, number], styles[side], number, len(sides))
    return figure


def _legend(figure: Any, panels: Any, styles: dict[str, Any], number: int, sides: int) -> None:
    """The families of one side below its panels."""
    handles: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels()):
            handles.setdefault(label, handle)
    labels = [label for label in (*styles, FRONT, OTHER) if label in handles]
    where = "outside lower center" if sides == 1 else ("outside lower left", "outside lower right")[number]
    figure.legend([handles[label] for label in labels], labels, loc=where, ncols=2, fontsize=11, frameon=False)


PALE = ("#F0E442", "#999999")
"""Yellow is lost on white, and grey on the band of the other side."""
SIDES = {"Chitu": ("own",), "free alternatives and other makers": ("free", "peer")}
FRONT = "no case of either side is both faster and nearer"
OTHER = "the best of the other side"


def _maker(case: dict[str, Any]) -> str:
    kind = case["case"]["kind"]
    return "peer" if kind in PEERS else "own" if kind in OURS else "free"


def _styles(made: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Colour, marker and line of each family of one side: the line tells who made it, marker and colour which one it is."""
    colours = [colour for colour in OKABE_ITO if colour not in PALE]
    return {
        family: {
            "color": "#444444" if maker == "free" else colours[number % len(colours)],
            "marker": MARKERS[number % len(MARKERS)],
            "linestyle": LINES[maker],
            "markerfacecolor": "white" if maker == "peer" else None,
        }
        for number, (family, maker) in enumerate(made.items())
    }


def _other_best(axes: Any, cases: list[dict[str, Any]], side: str) -> None:
    """The front of what is not on this side, as a broad pale line."""
    rest = [case for case in cases if _maker(case) not in SIDES[side] and psnr_of(case)["mean"] < EXACT]
    best = sorted((case for case in rest if case["id"] in pareto(rest)), key=speedup_of)
    if best:
        x, y = [speedup_of(case) for case in best], [psnr_of(case)["mean"] for case in best]
        axes.plot(x, y, color="#bbbbbb", linewidth=6, alpha=0.6, zorder=0, solid_capstyle="round", label=OTHER)


def _panel(axes: Any, cases: list[dict[str, Any]], styles: dict[str, dict[str, Any]], side: str) -> None:
    """One side's families, over what the other reaches."""
    front = pareto(cases)
    _other_best(axes, cases, side)
    for family, style in styles.items():
        # Equal pictures, where nothing was skipped, would stretch the axis and say nothing.
        points = [c for c in cases if c["case"]["family"] == family and psnr_of(c)["mean"] < EXACT]
        points.sort(key=speedup_of)
        if not points:
            continue
        leads = any(c["id"] in front for c in points)
        x, y = [speedup_of(c) for c in points], [psnr_of(c)["mean"] for c in points]
        speeds = [c["timing"]["speedup"]["denoise"] for c in points]
        intervals = [psnr_of(c)["interval"] for c in points]
        axes.errorbar(
            x,
            y,
            xerr=[[a - s["least"] for a, s in zip(x, speeds)], [s["most"] - a for a, s in zip(x, speeds)]],
            yerr=[[b - low for b, (low, _) in zip(y, intervals)], [high - b for b, (_, high) in zip(y, intervals)]],
            label=family,
            markersize=6,
            linewidth=2.6 if leads else 1.1,
            zorder=4 if leads else 2,
            elinewidth=0.7,
            capsize=1.5,
            **style,
        )
    best = [c for c in cases if c["id"] in front and c["case"]["family"] in styles and psnr_of(c)["mean"] < EXACT]
    ring = {"s": 130, "facecolors": "none", "edgecolors": "black", "linewidths": 1.3, "zorder": 5}
    axes.scatter([speedup_of(c) for c in best], [psnr_of(c)["mean"] for c in best], label=FRONT, **ring)
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    ticks = [t for t in (0.75, 1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 15, 20) if low <= t <= high]
    axes.set_xticks(ticks, [f"{tick:g}×" for tick in ticks])
    axes.minorticks_off()
    axes.text(0.985, 0.97, side, transform=axes.transAxes, ha="right", va="top", fontsize=12, weight="bold")
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


CELL, GAP, LABEL, CAPTION, HEAD = 128, 6, 250, 18, 62
"""Pixels."""


def contact_sheet(
    summary: dict[str, Any], sources: Sequence[Path], path: Path, *, ratio: float = 2.0, columns: int = 6
) -> Path | None:
    """Prompts across, cases down: of each family the case whose FLOPs are nearest to the baseline's over `ratio`.

    Args:
        sources: results folders, which hold the pictures.

    Returns:
        `path`, or None where there are no pictures.
    """
    from PIL import Image, ImageDraw, ImageFont

    drawn = [group for group in groups(summary) if _pictures(sources, group[0]["id"])]
    baseline, cases = max(drawn, key=lambda group: sum(map(complete, group[1])), default=(None, []))
    chosen = [case for case in chosen_cases(cases, ratio) if _pictures(sources, case["id"])]
    if baseline is None or not chosen:
        return None
    seeds = len(baseline["content"]["seeds"])
    columns = min(columns, len(baseline["prompts"]), len(_pictures(sources, baseline["id"])) // seeds)
    font, small = (ImageFont.truetype(_font(), size) for size in (14, 12))
    size = (LABEL + columns * (CELL + GAP), HEAD + (len(chosen) + 1) * (CELL + CAPTION + GAP))
    page = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(page)
    for column, prompt in enumerate(baseline["prompts"][:columns]):
        text = textwrap.fill(prompt, 19, max_lines=4, placeholder=" …")
        draw.text((LABEL + column * (CELL + GAP), 4), text, fill="black", font=small)
    rows = [(baseline["id"], "baseline", [])] + [(c["id"], _row_label(c), c["quality"]["shown_psnr"]) for c in chosen]
    for row, (name, label, psnrs) in enumerate(rows):
        top = HEAD + row * (CELL + CAPTION + GAP)
        draw.text((4, top + 4), label, fill="black", font=font)
        pictures = _pictures(sources, name)
        for column in range(min(columns, len(pictures) // seeds)):
            left, number = LABEL + column * (CELL + GAP), column * seeds
            with Image.open(pictures[number]) as picture:
                picture.thumbnail((CELL, CELL))
                page.paste(picture, (left, top))
            if psnrs:
                draw.text((left + 2, top + CELL + 1), f"{psnrs[number]:.1f} dB", fill="black", font=small)
    write_whole(path, lambda half: page.save(half, format="PNG", optimize=True))
    return path


def _font() -> str:
    """A font that knows × and ÷; matplotlib brings it."""
    import matplotlib

    return str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf")


def _row_label(case: dict[str, Any]) -> str:
    lines = textwrap.wrap(label_of(case).replace(", ", " "), 30)
    ratio = case["quality"]["flops_ratio"]
    return "\n".join([*lines, f"FLOPs ÷ {ratio:.2f}, mean {psnr_of(case)['mean']:.1f} dB"])


def chosen_cases(cases: list[dict[str, Any]], ratio: float) -> list[dict[str, Any]]:
    """Of each family the case whose FLOPs ratio is nearest to `ratio`, best PSNR first."""
    best: dict[str, dict[str, Any]] = {}
    for case in cases:
        if not complete(case) or not case["quality"]["flops_ratio"]:
            continue
        family, off = case["case"]["family"], abs(case["quality"]["flops_ratio"] - ratio)
        if family not in best or off < abs(best[family]["quality"]["flops_ratio"] - ratio):
            best[family] = case
    return sorted(best.values(), key=lambda case: -psnr_of(case)["mean"])


def _pictures(sources: Sequence[Path], name: str) -> list[Path]:
    for source in sources:
        found = sorted((source / "pictures" / name).glob("*.png"))
        if found:
            return found
    return []
