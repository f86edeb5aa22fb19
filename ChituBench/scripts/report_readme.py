"""The headline table of the README, between its markers, from the stored results. A result that is not there has no row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import report_shapes

from chitu_diffusion.bench.equal_flops import curve, maker, value_at
from chitu_diffusion.bench.kinds import PEERS
from chitu_diffusion.bench.parallel_tables import ms_of, timed
from chitu_diffusion.bench.results import summary
from chitu_diffusion.bench.tables import complete, groups, machine_of, psnr_of

BEGIN, END = "<!-- headline -->", "<!-- /headline -->"
COLUMNS = (
    "what", "hardware, torch", "size, steps", "ms a step", "beside it", "end to end", "of the floor", "quality", "command",
)  # fmt: skip


def headline(results: dict[str, Any]) -> str:
    """The tables: what a step costs, and what caches keep at equal compute.

    Args:
        results: name of a stored file -> what is in it, or None.
    """
    rows: list[list[str]] = []
    if results["model_shapes"] is not None:
        rows += shapes(results["model_shapes"])
    if results["overhead"] is not None:
        rows += overhead(results["overhead"])
    if results["attention"] is not None and results["model_shapes"] is None:
        rows += attention(results["attention"])
    for run in results["parallel"] or ():
        rows += several_gpus(run)
    if results["flexcache"] is not None:
        rows += caches(results["flexcache"])
    if results["parallel_bench"] is not None:
        rows += ranks(results["parallel_bench"])
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    table = "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])
    found = quality(results["flexcache"]) if results["flexcache"] is not None else ""
    return f"{table}\n\n{found}" if found else table


def filled(text: str, table: str) -> str:
    """The README with `table` between the markers."""
    before, rest = text.split(BEGIN, 1)
    _, after = rest.split(END, 1)
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


FLUX = "FLUX.1-dev shape, random weights"


def overhead(data: dict[str, Any]) -> list[list[str]]:
    where, eager, compiled = f"{data['machine']}, {short(data['torch'])}", data["eager"], data["compiled"]
    rows = []
    for key, what, beside in (
        ("every seam watched", "hooked at all four seams, nothing changed", "unhooked"),
        ("skipped step", "a step that `static` skips", ""),
    ):
        digits = 2 if key == "skipped step" else 1
        ms = f"{compiled[key]['ms']:.{digits}f} (eager {eager[key]['ms']:.{digits}f})"
        other = f"{beside} {compiled[beside]['ms']:.1f} ({eager[beside]['ms']:.1f})" if beside else ""
        rows.append([f"{FLUX}: {what}", where, "1024²", ms, other, "", "", "", script("overhead.py")])
    return rows


def attention(data: dict[str, Any]) -> list[list[str]]:
    where = f"{data['machine']['gpu']}, {short(data['versions']['torch'])}"
    ms = {mode["mode"]: {name: c["median_ms"] for name, c in mode["candidates"].items()} for mode in data["steps"]}
    own = f"{ms['compiled']['auto']:.1f} (eager {ms['eager']['auto']:.1f})"
    stock = f"stock {ms['compiled']['stock']:.1f} ({ms['eager']['stock']:.1f})"
    return [[f'{FLUX}: `attention="auto"`', where, "1024²", own, stock, "", "", "close", script("attention.py")]]


def shapes(data: dict[str, Any]) -> list[list[str]]:
    """Of each model ours beside stock, and denoising with a first-block cache that skips every second step; compiled."""
    where = f"{data['machine'].get('gpu') or 'CPU'}, {short(data['versions']['torch'])}"
    rows = []
    for row in report_shapes.measured(data).values():
        floor, found = report_shapes.floor_ms(row, data), row["compiled"]
        stock, ours, cached = (found.get(name, {}) for name in ("stock", report_shapes.OURS, "fbcache"))
        if not stock.get("ms") or not ours.get("ms"):
            continue
        name, size = row["title"].split(", ", 1)
        half = f", {cached['denoise_ms'] / 1e3:.2f} s with `fbcache` skipping half" if "denoise_ms" in cached else ""
        rows.append(
            [
                f'{name} shape, random weights, compiled: `attention="auto"`',
                where,
                f"{size}, {row['steps']} steps",
                f"{ours['ms']:.1f}",
                f"stock {stock['ms']:.1f}",
                f"{ours['denoise_ms'] / 1e3:.2f} s denoising{half}",
                f"{100 * floor / ours['ms']:.0f} %" if floor else "",
                "speed only",
                script("model_shapes.py"),
            ]
        )
    return rows


GPU_SHAPES = {
    "flux-1024": ("FLUX.1-dev", "1024²"),
    "flux-2048": ("FLUX.1-dev", "2048²"),
    "qwen-1024": ("Qwen-Image", "1024²"),
    "sd3-1024": ("SD3.5 Large", "1024²"),
    "wan-480p": ("Wan2.1-1.3B", "480p, 81 frames"),
}


def several_gpus(run: dict[str, Any]) -> list[list[str]]:
    """The fastest of ours at each size, beside the fastest of diffusers' own."""
    rows = []
    for shape, (name, size) in GPU_SHAPES.items():
        timed_rows = {
            title: row
            for title, row in run["shapes"].get(shape, {}).items()
            if "ms" in row and row.get("correct", True)
        }
        single = [row["ms"] for title, row in timed_rows.items() if title.startswith("one GPU")]
        ours = {t: r for t, r in timed_rows.items() if not t.startswith(("one GPU", "diffusers"))}
        others = {t: r["ms"] for t, r in timed_rows.items() if t.startswith("diffusers")}
        if not single or not ours:
            continue
        title, row = min(ours.items(), key=lambda item: item[1]["ms"])
        beside = min(others.items(), key=lambda item: item[1], default=None)
        rows.append(
            [
                f"{name} shape, random weights, compiled: {title}",
                f"{run['ranks']} × {run['machine']['gpu']}, {short(run['versions']['torch'])}",
                size,
                f"{row['ms']:.1f} ({min(single) / row['ms']:.2f}× of one GPU)",
                f"{beside[0]} {beside[1]:.1f}" if beside else "",
                "",
                "",
                f"off by {row['relative_difference']:.1%} (bfloat16)",
                script("parallel_scaling.py"),
            ]
        )
    return rows


def caches(data: Any) -> list[list[str]]:
    """For each baseline the best of our cases at half its FLOPs or less, by mean PSNR."""
    rows = []
    for baseline, cases in groups(data):
        ours = [case for case in cases if complete(case) and case["case"]["kind"] == "chitu"]
        half = [case for case in ours if (case["quality"]["flops_ratio"] or 0) >= 1.9]
        if half and baseline["timing"]:
            rows.append(_cached(baseline, max(half, key=lambda case: psnr_of(case)["mean"])))
    return rows


RATIOS = (2.0, 3.0, 5.0)
KINDS_OF = {
    "the planned cache": lambda family, kind: family == "planned",
    "the best of our other caches": lambda family, kind: maker(kind) == "Chitu" and family != "planned",
    "the best of diffusers' caches and cache-dit": lambda family, kind: kind in PEERS,
    "the best without a cache": lambda family, kind: maker(kind) == "free",
}


def quality(data: Any) -> str:
    """Who reaches what at equal counted FLOPs: a table of the runs with the most pictures; empty if there is none."""
    runs = [(baseline, [c for c in cases if complete(c)]) for baseline, cases in groups(data)]
    most = max((_pictures(baseline) for baseline, _ in runs), default=0)
    head = ["PSNR to the run without a cache, dB, at FLOPs ÷", *(f"{ratio:g}" for ratio in RATIOS)]
    parts = []
    for baseline, cases in runs:
        kinds = {case["case"]["family"]: case["case"]["kind"] for case in cases}
        if _pictures(baseline) < most or "planned" not in kinds:
            continue
        curves = {family: curve(cases, family) for family in kinds}
        lines = [f"| {baseline['content']['steps']} steps: " + " | ".join(head) + " |", "|---|" + "---|" * len(RATIOS)]
        for name, wanted in KINDS_OF.items():
            some = [family for family, kind in kinds.items() if wanted(family, kind)]
            lines.append(f"| {name} | " + " | ".join(_best(curves, some, ratio) for ratio in RATIOS) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _pictures(baseline: dict[str, Any]) -> int:
    return len(baseline["prompts"]) * len(baseline["content"]["seeds"])


def _best(curves: dict[str, list[tuple[float, float]]], families: list[str], ratio: float) -> str:
    """The family that is nearest at so much less compute, and by how many dB."""
    values = {family: value_at(curves[family], ratio) for family in families}
    found = {family: value for family, value in values.items() if value is not None}
    if not found:
        return ""
    family = max(found, key=lambda name: found[name][0])
    value, within = found[family]
    text = f"{value:.1f}" if within else f"*{value:.1f}*"
    return f"**{text}**" if family == "planned" else f"{text} ({family})"


def _cached(baseline: dict[str, Any], case: dict[str, Any]) -> list[str]:
    content, psnr, timing = baseline["content"], psnr_of(case), case["timing"]
    cached, plain = (
        1e3 * one["seconds"]["denoise"]["median"] / content["steps"] for one in (timing, baseline["timing"])
    )
    low, high = psnr["interval"]
    return [
        f"{content['name']} model: {case['case']['label']}, FLOPs ÷ {case['quality']['flops_ratio']:.2f}",
        f"{machine_of(content)}, {short(baseline['versions']['torch'])}",
        "×".join(str(n) for n in content["size"] if n) + f", {content['steps']} steps",
        f"{cached:.1f}",
        f"no cache {plain:.1f}",
        f"{timing['seconds']['end_to_end']['median']:.2f} s",
        "",
        f"PSNR {psnr['mean']:.1f} dB ({low:.1f}–{high:.1f})",
        "`chitu bench flexcache`",
    ]


def ranks(data: Any) -> list[list[str]]:
    """For each baseline and number of processes the fastest mode of ours, beside the fastest single process."""
    rows = []
    for baseline, cases in groups(data):
        content, found = baseline["content"], timed(cases)
        where = f"{machine_of(content)}, {short(baseline['versions']['torch'])}"
        several = [case for case in found if case["case"]["ranks"] > 1 and case["case"]["maker"] == "chitu"]
        for count in sorted({case["case"]["ranks"] for case in several}):
            best = min((case for case in several if case["case"]["ranks"] == count), key=ms_of)
            against = best["timing"]["against"]
            rows.append(
                [
                    f"{content['name']} model: {best['case']['name']}",
                    where,
                    "×".join(str(n) for n in content["size"] if n) + f", {content['steps']} steps",
                    f"{ms_of(best):.1f} ({best['timing']['speedup']['step']['median']:.2f}×)",
                    f"{against['name']} {against['ms_step']:.1f}",
                    f"{best['timing']['seconds']['end_to_end']['median']:.2f} s",
                    "",
                    f"off by {best['off']:.0e}" if best["off"] else "",
                    "`chitu bench parallel`",
                ]
            )
    return rows


def short(torch: str) -> str:
    return f"torch {torch.split('+')[0]}"


def script(name: str) -> str:
    return f"`ChituBench/scripts/{name}`"


def stored(folder: Path, read: Any) -> dict[str, Any]:
    """Name -> what is stored, for every file that the table reads; None for one that is not there."""
    found: dict[str, Any] = {}
    for name in ("overhead", "attention", "model_shapes"):
        found[name] = read(name) if (folder / f"{name}.json").is_file() else None
    found["parallel"] = [read(path.stem) for path in sorted(folder.glob("parallel_x*.json"))] or None
    for name in ("flexcache", "parallel_bench"):
        path = folder / f"{name}.json"
        found[name] = summary([path]) if path.is_file() else None
    return found
