"""Pictures of stored results: the trade-off of speed and quality, and a contact sheet."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .attention_plot import OKABE_ITO
from .files import write_whole
from .kinds import OURS, PEERS
from .tables import complete, groups, pareto, psnr_of, speedup_of, title

MARKERS = "osD^vP*X<>hp"
LINES = {"free": (0, (4, 2)), "peer": (0, (1, 1.4)), "own": "solid"}


def plot(summary: dict[str, Any], folder: Path, name: str = "flexcache") -> list[Path]:
    """One picture for each machine and model: a panel for each number of steps; the paths."""
    import matplotlib

    matplotlib.use("Agg")
    made = []
    panels: dict[str, list[Any]] = {}
    for baseline, cases in groups(summary):
        if any(complete(case) for case in cases):
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
    from matplotlib.figure import Figure

    families = list(dict.fromkeys(case["case"]["family"] for _, cases in group for case in cases))
    styles = _styles(families, {case["case"]["family"]: case["case"]["kind"] for _, cases in group for case in cases})
    figure = Figure(figsize=(10, 0.5 + 0.075 * len(families) + 4.4 * len(group)), layout="constrained")
    panels = figure.subplots(len(group), 1, squeeze=False)[:, 0]
    for axes, (baseline, cases) in zip(panels, group):
        _panel(axes, [case for case in cases if complete(case)], styles)
        axes.set_title(title(baseline), fontsize=11, loc="left")
    handles: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels()):
            handles.setdefault(label, handle)
    labels = [family for family in (*families, FRONT) if family in handles]
    figure.legend(
        [handles[label] for label in labels], labels, loc="outside lower center", ncols=3, fontsize=10, frameon=False
    )
    panels[-1].set_xlabel("speed-up of denoising over the baseline (median; bar: least to most), log scale")
    return figure


FRONT = "Pareto front"
MOST_DB = 60


def _styles(families: Sequence[str], kinds: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Colour, marker and line of each family: the line tells who made it, marker and colour which one it is."""
    styles = {}
    for number, family in enumerate(families):
        kind = kinds[family]
        maker = "peer" if kind in PEERS else "own" if kind in OURS else "free"
        colours = [colour for colour in OKABE_ITO if colour != "#F0E442"]  # yellow is lost on white
        styles[family] = {
            "color": "#444444" if maker == "free" else colours[number % len(colours)],
            "marker": MARKERS[number % len(MARKERS)],
            "linestyle": LINES[maker],
            "markerfacecolor": "white" if maker == "peer" else None,
        }
    return styles


def _panel(axes: Any, cases: list[dict[str, Any]], styles: dict[str, dict[str, Any]]) -> None:
    front = pareto(cases)
    for family, style in styles.items():
        points = sorted((c for c in cases if c["case"]["family"] == family), key=speedup_of)
        if not points:
            continue
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
            linewidth=1.4,
            elinewidth=0.7,
            capsize=1.5,
            **style,
        )
    best = sorted((c for c in cases if c["id"] in front), key=speedup_of)
    ring = {"s": 130, "facecolors": "none", "edgecolors": "black", "linewidths": 1.3, "zorder": 5}
    axes.scatter([speedup_of(c) for c in best], [psnr_of(c)["mean"] for c in best], label=FRONT, **ring)
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    ticks = [t for t in (0.75, 1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 15, 20) if low <= t <= high]
    axes.set_xticks(ticks, [f"{tick:g}×" for tick in ticks])
    axes.minorticks_off()
    if axes.get_ylim()[1] > MOST_DB:  # a case that skipped nothing would flatten all others
        axes.set_ylim(top=MOST_DB)
    axes.set_ylabel("PSNR to the baseline, dB\n(mean; bar: 95 % interval)")
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

    baseline, cases = max(groups(summary), key=lambda group: sum(map(complete, group[1])), default=(None, []))
    chosen = chosen_cases(cases, ratio)
    if baseline is None or not chosen or not _pictures(sources, baseline["id"]):
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
    lines = textwrap.wrap(case["case"]["label"].replace(", ", " "), 30)
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
