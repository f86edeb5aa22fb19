"""The headline table of the README, between its markers, from the stored results. A result that is not there has no row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import report_shapes

from chitu_diffusion.bench.parallel_tables import ms_of, timed
from chitu_diffusion.bench.results import summary
from chitu_diffusion.bench.tables import complete, groups, machine_of, psnr_of

BEGIN, END = "<!-- headline -->", "<!-- /headline -->"
COLUMNS = (
    "what", "hardware, torch", "size, steps", "ms a step", "beside it", "end to end", "of the floor", "quality", "command",
)  # fmt: skip


def headline(results: dict[str, Any]) -> str:
    """The table.

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
    for runs in results["parallel"] or ():
        rows += several_gpus(runs)
    if results["flexcache"] is not None:
        rows += caches(results["flexcache"])
    if results["parallel_bench"] is not None:
        rows += ranks(results["parallel_bench"])
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


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
    "wan-480p": ("Wan2.1-1.3B", "480p, 81 frames"),
}


def several_gpus(runs: list[dict[str, Any]]) -> list[list[str]]:
    """The fastest of ours at each size, beside the fastest of diffusers' own, from runs on as many GPUs."""
    rows = []
    for shape, (name, size) in GPU_SHAPES.items():
        timed_rows = {
            title: row
            for run in runs
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
                f"{runs[0]['ranks']} × {runs[0]['machine']['gpu']}, {short(runs[0]['versions']['torch'])}",
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


MAKERS = (("chitu",), ("diffusers", "cache-dit"), ("fewer steps", "coarser grid"))
"""Kinds of cases: ours, others', and those that need no cache."""


def caches(data: Any) -> list[list[str]]:
    """For each baseline: of the cases at half its FLOPs or less the best of each of `MAKERS`, by mean PSNR."""
    rows = []
    for baseline, cases in groups(data):
        half = [case for case in cases if complete(case) and (case["quality"]["flops_ratio"] or 0) >= 1.9]
        for kinds in MAKERS if baseline["timing"] else ():
            some = [case for case in half if case["case"]["kind"] in kinds]
            if some:
                rows.append(_cached(baseline, max(some, key=lambda case: psnr_of(case)["mean"])))
    return rows


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
    # One file for each number of GPUs; the first measurement, of two, as long as there is none.
    by_ranks = [[read(path.stem)] for path in sorted(folder.glob("parallel_x*.json"))]
    first = [read("parallel")["runs"]] if (folder / "parallel.json").is_file() else None
    found["parallel"] = by_ranks or first
    for name in ("flexcache", "parallel_bench"):
        path = folder / f"{name}.json"
        found[name] = summary([path]) if path.is_file() else None
    return found
