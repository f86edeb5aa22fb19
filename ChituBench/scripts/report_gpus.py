"""The page's section on one picture on several GPUs, from `results/parallel_x*.json`, and its picture."""

# ruff: noqa: E501 - the lines of the page are as they are on the page

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from chitu_diffusion.bench.attention_plot import HATCHES, OKABE_ITO

SHAPES = {
    "flux-1024": "FLUX.1-dev shape, 1024²",
    "flux-2048": "FLUX.1-dev shape, 2048²",
    "qwen-1024": "Qwen-Image shape with guidance, 1024²",
    "sd3-1024": "SD3.5 Large shape with guidance, 1024²",
    "wan-480p": "Wan2.1-1.3B shape with guidance, 480p × 81 frames",
}
NUMBERS = {2: "Two", 4: "Four", 8: "Eight"}


def section(data: dict[str, Any]) -> str:
    """One picture on several GPUs, ours and diffusers' own."""
    ranks, versions = data["ranks"], data["versions"]
    parts = []
    for shape, title in SHAPES.items():
        rows = data["shapes"].get(shape, {})
        if any("ms" in row for row in rows.values()):
            parts.append(_scaling_table(title, rows))
    lines = "\n".join(
        f"torchrun --standalone --nproc-per-node {ranks} ChituBench/scripts/{c}" for c in data["commands"]
    )
    found = [row for shape in data["shapes"].values() for row in shape.values() if "ms" in row]
    far = max((row["relative_difference"] for row in found if row["correct"]), default=0.0)
    names = {name for shape in data["shapes"].values() for name, row in shape.items() if "ms" in row}
    words = [text for word, text in WORDS.items() if any(f", {word}" in name for name in names)]
    legend = f" {'; '.join(words)}." if words else ""
    since = "" if any(", groups" in name for name in names) else f"\n\n{IN_ONE_PIECE}"
    return f"""## {NUMBERS.get(ranks, ranks)} GPUs, one picture

{ranks} × {data["machine"]["gpu"]}, bfloat16, real shapes with random weights, compiled blocks; torch {versions["torch"]}, \
diffusers {versions["diffusers"]}; *ours* with `attention="auto"` ({_kernels(found)}); commit {data["commit"]}. [Data](results/parallel_x{ranks}.json):

```
{lines}
```

![milliseconds of a step by kind of work, for every mode](plots/parallel_x{ranks}.png)

{(chr(10) * 2).join(parts)}

The modes gave the picture of one GPU within {math.ceil(1000 * far) / 10:.1f} % (2-norm of the latents, bfloat16). The last columns are milliseconds of a profiled step,
which is a little slower: kernels of attention, matrix products and pointwise work, exchanges that nothing else hid, and time in which the GPU did
nothing. Rows of one size were measured in one run, one after the other.{legend}{since}"""


WORDS = {
    "graphs": "*Graphs*: the denoiser recorded as one CUDA graph",
    "groups": "*groups N*: attention is exchanged in N head groups",
    "reordered": "*reordered*: inductor moves the exchanges",
}
"""What a word in the name of a row means."""
IN_ONE_PIECE = """All attention here was exchanged in one piece. Large exchanges are divided into head groups since (`Parallel(overlap=…)`), of which no run is
stored yet."""


def _kernels(rows: list[dict[str, Any]]) -> str:
    """What `auto` chose, in all rows together."""
    features = [feature for row in rows for feature in row.get("features", ())]
    chosen = [kernels.split(" or ") for feature in features for kernels in feature.get("chosen", {}).values()]
    return ", ".join(sorted({kernel for kernels in chosen for kernel in kernels}))


KERNEL_KINDS = {
    "attention": "attention",
    "matmul": "matrix products",
    "fused pointwise": "pointwise",
    "exposed collective": "exchange",
    "idle": "idle",
}


def _scaling_table(title: str, rows: dict[str, Any]) -> str:
    timed = _timed(rows)
    single = min(row["ms"] for name, row in timed.items() if name.startswith("one GPU"))
    lines = [
        f"| {title} | ms a step | over the fastest single GPU | {' | '.join(KERNEL_KINDS.values())} |",
        "|---|---|---|" + "---|" * len(KERNEL_KINDS),
    ]
    for name, row in timed.items():
        where = row.get("where_ms") or {}
        wrong = "" if row["correct"] else " (another picture)"
        parts = " | ".join(f"{where[kind]:.1f}" if kind in where else "" for kind in KERNEL_KINDS)
        lines.append(f"| {name}{wrong} | {row['ms']:.1f} | {single / row['ms']:.2f}× | {parts} |")
    missing = {name: row.get("failed") or row["skipped"] for name, row in rows.items() if "ms" not in row}
    late = [name for name, why in missing.items() if why.endswith("were not left")]
    words = [f"{name} ({why})" for name, why in missing.items() if name not in late]
    if late:
        words.append(f"{len(late)} more modes, for which no time was left")
    return "\n".join(lines) + (f"\n\nWithout a number: {'; '.join(words)}." if words else "")


PARTS = {**KERNEL_KINDS, "copy": "other", "other": "other"}


def plot(data: dict[str, Any], path: Path) -> Path:
    """A bar for each mode and shape: what a profiled step is made of, and a mark where the timed one is."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    shapes = {name: _timed(data["shapes"].get(name, {})) for name in SHAPES}
    shapes = {name: rows for name, rows in shapes.items() if rows}
    heights = [len(rows) + 1.2 for rows in shapes.values()]
    figure = Figure(figsize=(10, 0.9 + 0.33 * sum(heights)), layout="constrained")
    panels = figure.subplots(len(shapes), 1, squeeze=False, height_ratios=heights)[:, 0]
    labels = list(dict.fromkeys(PARTS.values()))
    for axes, (shape, rows) in zip(panels, shapes.items()):
        for place, row in enumerate(rows.values()):
            left = 0.0
            for number, label in enumerate(labels):
                width = sum(row.get("where_ms", {}).get(kind, 0.0) for kind, name in PARTS.items() if name == label)
                look = {"color": OKABE_ITO[number], "hatch": HATCHES[number % len(HATCHES)], "edgecolor": "white"}
                axes.barh(
                    place, width, left=left, height=0.72, linewidth=0, label=label if place == 0 else None, **look
                )
                left += width
            timed = {"linestyle": "none", "marker": "|", "color": "black", "markersize": 15, "markeredgewidth": 2.5}
            axes.plot(row["ms"], place, label="timed without the profiler" if place == 0 else None, **timed)
        single = min(row["ms"] for name, row in rows.items() if name.startswith("one GPU"))
        names = [f"{name}  {single / row['ms']:.2f}×" for name, row in rows.items()]
        axes.set_yticks(range(len(rows)), names, fontsize=10)
        axes.invert_yaxis()
        axes.set_title(SHAPES[shape], fontsize=11, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", alpha=0.25, linewidth=0.6)
        axes.set_axisbelow(True)
    panels[-1].set_xlabel(
        f"milliseconds a step, {data['ranks']} × {data['machine']['gpu']}; after the name the speed-up over the fastest single GPU"
    )
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4, fontsize=10, frameon=False)
    figure.savefig(path, dpi=140)
    return path


def _timed(rows: dict[str, Any]) -> dict[str, Any]:
    return dict(sorted(((name, row) for name, row in rows.items() if "ms" in row), key=lambda item: -item[1]["ms"]))
