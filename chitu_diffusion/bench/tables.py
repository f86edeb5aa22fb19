"""Stored results of `chitu bench flexcache` as Markdown, and what the pictures need to know of them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

COLUMNS = (
    "case",
    "FLOPs ÷",
    "denoise, speed-up",
    "end to end, s",
    "calls",
    "PSNR, dB",
    "worst",
    "SSIM",
    "MS-SSIM",
    "latent rel. L2",
    "held, MiB",
    "peak, MiB",
)

NOTICED = 0.02
"""Relative difference of two counts of FLOPs from which on the table tells both."""
TIMED = (
    "*FLOPs ÷* is over all pictures; *timed* is that of the pictures whose seconds these are, where it differs by more "
    f"than {NOTICED:.0%}."
)


def groups(summary: dict[str, Any]) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Each baseline that has cases, with its cases in the order of the case file."""
    found = []
    for baseline in summary["baselines"]:
        cases = [case for case in summary["cases"] if case["baseline"] == baseline["id"]]
        if cases:
            found.append((baseline, cases))
    return found


def complete(case: dict[str, Any]) -> bool:
    return case["error"] is None and case["quality"] is not None and case["timing"] is not None


def pareto(cases: Iterable[dict[str, Any]]) -> set[str]:
    """Ids of the cases that no other case beats in speed-up of denoising and in mean PSNR at once."""
    points = [(speedup_of(case), psnr_of(case)["mean"], case["id"]) for case in cases if complete(case)]
    return {
        name
        for speed, psnr, name in points
        if not any(s >= speed and p >= psnr and (s, p) != (speed, psnr) for s, p, _ in points)
    }


def speedup_of(case: dict[str, Any]) -> float:
    return case["timing"]["speedup"]["denoise"]["median"]


def psnr_of(case: dict[str, Any]) -> dict[str, Any]:
    return case["quality"]["metrics"]["psnr"]


def section(summary: dict[str, Any]) -> str:
    """One table for each baseline, with what it was measured on."""
    return "\n\n".join(_group(baseline, cases) for baseline, cases in groups(summary))


def _group(baseline: dict[str, Any], cases: list[dict[str, Any]]) -> str:
    from .equal_flops import table  # which reads cases as this file does

    lines = [f"### {title(baseline)}", "", described(baseline), "", f"`{baseline['command']}`", ""]
    side_by_side = table([case for case in cases if complete(case)])
    lines += [side_by_side, ""] if side_by_side else []
    columns = [c for c in COLUMNS if c != "LPIPS"] + (["LPIPS"] if _has(cases, "lpips") else [])
    lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines.append(_baseline_row(baseline, len(columns)))
    front = pareto(cases)
    lines += [_row(case, case["id"] in front, columns) for case in cases]
    notes = sorted({note for case in cases for note in (case["quality"] or {}).get("notes", ())})
    if any(own_ratio(case) for case in cases):
        notes.insert(0, TIMED)
    if notes:
        lines += ["", *(f"- {note}" for note in notes)]
    return "\n".join(lines)


def title(baseline: dict[str, Any]) -> str:
    content = baseline["content"]
    return f"{content['name']} model, {content['steps']} steps, {machine_of(content)}"


def machine_of(content: dict[str, Any]) -> str:
    return content["machine"].get("gpu") or f"CPU ({content['machine'].get('cpu')})"


def described(baseline: dict[str, Any]) -> str:
    """What the numbers below are of."""
    content, versions = baseline["content"], baseline["versions"]
    size = " × ".join(str(n) for n in content["size"] if n)
    words = [
        f"{content['pipeline']}, {size} pixels" if size else content["pipeline"],
        f"{content['dtype']}, {content['scheduler'][0]}, guidance {content['guidance']}",
        f"{len(baseline['prompts'])} prompts × {len(content['seeds'])} seeds",
        ", ".join(f"{name} {versions[name]}" for name in ("torch", "diffusers", "cache-dit") if name in versions),
        f"commit {baseline['commit']}, {baseline['time'][:10]}",
    ]
    return "; ".join(words) + "."


def _baseline_row(baseline: dict[str, Any], width: int) -> str:
    took, timing = baseline["took"] or {}, baseline["timing"]
    flops = took.get("flops")
    cells = [
        "baseline",
        "1" + (f" ({flops / 1e12:.2f} TFLOP)" if isinstance(flops, int) else ""),
        f"1 ({seconds(timing['seconds']['denoise'])})" if timing else "",
        f"{timing['seconds']['end_to_end']['median']:.2f}" if timing else "",
        calls(took.get("calls")),
    ]
    cells += [""] * (width - len(cells))
    if timing and timing["peak_memory"]:
        cells[COLUMNS.index("peak, MiB")] = mebibytes(timing["peak_memory"])
    return "| " + " | ".join(cells) + " |"


def _row(case: dict[str, Any], best: bool, columns: list[str]) -> str:
    label = f"**{label_of(case)}**" if best else label_of(case)
    if case["error"] is not None:
        return f"| {label} | {case['error'].replace('|', '/')} |" + " |" * (len(columns) - 2)
    quality, timing = case["quality"] or {}, case["timing"]
    metrics = quality.get("metrics", {})
    ratio, own = quality.get("flops_ratio"), own_ratio(case)
    speed = timing["speedup"]["denoise"] if timing else None
    cells = [
        label,
        (f"{ratio:.2f}" if ratio else "") + (f" (timed: {own:.2f})" if own else ""),
        f"{speed['median']:.2f} ({speed['least']:.2f}–{speed['most']:.2f})" if speed else "",
        f"{timing['seconds']['end_to_end']['median']:.2f}" if timing else "",
        calls(quality.get("calls")),
        _interval(metrics.get("psnr")),
        f"{metrics['psnr']['worst']:.1f}" if "psnr" in metrics else "",
        *(f"{metrics[name]['mean']:.3f}" if name in metrics else "" for name in ("ssim", "ms_ssim", "latent_rel_l2")),
        mebibytes(timing["bytes_held"]) if timing and timing["bytes_held"] is not None else "",
        mebibytes(timing["peak_memory"]) if timing and timing["peak_memory"] else "",
    ]
    if "LPIPS" in columns:
        cells.append(f"{metrics['lpips']['mean']:.3f}" if "lpips" in metrics else "")
    return "| " + " | ".join(cells) + " |"


def own_ratio(case: dict[str, Any]) -> float | None:
    """FLOPs ÷ of the pictures that were timed, where it is noticeably another than that of all pictures.

    A cache that decides by itself computes more steps of one picture than of another. Results of before do not have it.
    """
    of_all, own = ((case[part] or {}).get("flops_ratio") for part in ("quality", "timing"))
    return own if of_all and own and abs(own / of_all - 1) > NOTICED else None


def label_of(case: dict[str, Any]) -> str:
    """The case's label, with long lists left out: the family tells them apart."""
    return re.sub(r"\[[^\]]{40,}.*?\](?=,|$)", "[…]", case["case"]["label"])


def _has(cases: list[dict[str, Any]], metric: str) -> bool:
    return any(metric in (case["quality"] or {}).get("metrics", {}) for case in cases)


def _interval(psnr: dict[str, Any] | None) -> str:
    if psnr is None:
        return ""
    low, high = psnr["interval"]
    return f"{psnr['mean']:.1f} ({low:.1f}–{high:.1f})"


def calls(by_branch: dict[str, dict[str, float]] | None) -> str:
    """Calls of a generation in which every block ran, a slash, all calls; one entry a branch unless they are alike."""
    if not by_branch:
        return ""
    words = [f"{_number(kinds.get('full', 0))}/{_number(sum(kinds.values()))}" for kinds in by_branch.values()]
    return f"{len(words)} × {words[0]}" if len(words) > 1 and len(set(words)) == 1 else ", ".join(words)


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def seconds(numbers: dict[str, Any]) -> str:
    return f"{numbers['median']:.2f} s, {numbers['least']:.2f}–{numbers['most']:.2f}"


def mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f}" if count < 100 * 2**20 else f"{count / 2**20:.0f}"
