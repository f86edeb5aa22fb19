"""Stored results of `chitu bench parallel` as Markdown, and what the pictures need to know of them."""

from __future__ import annotations

from typing import Any

from .tables import groups, machine_of

COLUMNS = (
    "mode",
    "processes",
    "ms a step",
    "speed-up",
    "encode, s",
    "denoise, s",
    "of it exchange, s",
    "decode, s",
    "off by",
)


def section(summary: dict[str, Any]) -> str:
    """One table for each baseline, with what it was measured on."""
    return "\n\n".join(_group(baseline, cases) for baseline, cases in groups(summary))


def title(baseline: dict[str, Any]) -> str:
    content = baseline["content"]
    cores = f", {content['cores']} cores" if content["cores"] else ""
    return f"{content['name']} model, {content['steps']} steps, {machine_of(content)}{cores}"


def timed(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cases that were measured: one process first, then by number of processes, the fastest first."""
    found = [case for case in cases if case["error"] is None]
    return sorted(found, key=lambda case: (case["case"]["ranks"], ms_of(case)))


def ms_of(case: dict[str, Any]) -> float:
    return case["timing"]["ms_step"]["median"]


def _group(baseline: dict[str, Any], cases: list[dict[str, Any]]) -> str:
    content, versions = baseline["content"], baseline["versions"]
    size = " × ".join(str(n) for n in content["size"] if n)
    words = [
        f"{content['pipeline']}, {size} pixels" if size else content["pipeline"],
        f"{content['dtype']}, {content['scheduler'][0]}, guidance {content['guidance']}, seed {content['seed']}",
        "compiled blocks" if content["compiled"] else "eager",
        ", ".join(f"{name} {versions[name]}" for name in ("torch", "diffusers") if name in versions),
        f"commit {baseline['commit']}, {baseline['time'][:10]}",
    ]
    lines = [f"### {title(baseline)}", "", "; ".join(words) + ".", "", f"`{baseline['command']}`", ""]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += [_row(case) for case in timed(cases)]
    lines += [_failed(case) for case in cases if case["error"] is not None]
    notes = [f"- {case['case']['name']}: {note}" for case in timed(cases) for note in case["notes"]]
    lines += ["", *notes] if notes else []
    return "\n".join(lines)


def _row(case: dict[str, Any]) -> str:
    timing = case["timing"]
    speed = timing["speedup"]["step"]
    cells = [
        case["case"]["name"],
        str(case["case"]["ranks"]),
        f"{ms_of(case):.1f} ({timing['ms_step']['least']:.1f}–{timing['ms_step']['most']:.1f})",
        f"{speed['median']:.2f}×",
        *(f"{timing['seconds'][stage]['median']:.2f}" for stage in ("encode", "denoise")),
        f"{timing['exchange']:.2f}",
        f"{timing['seconds']['decode']['median']:.2f}",
        f"{case['off']:.0e}" if case["off"] else "0",
    ]
    return "| " + " | ".join(cells) + " |"


def _failed(case: dict[str, Any]) -> str:
    text = case["error"].replace("|", "/")
    return f"| {case['case']['name']} | {case['case']['ranks']} | {text} |" + " |" * (len(COLUMNS) - 3)
