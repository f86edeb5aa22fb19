"""Timing in turns: the baseline and a group of cases, one call each a round, so that a drift of the machine hits them all."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .cases import Case
from .errors import one_line
from .lab import Item, Lab
from .meter import Meter

STAGES = ("encode", "denoise", "decode", "end_to_end")


@dataclass
class Timed:
    """What was seen of one case on the timed pictures."""

    took: dict[str, Any]
    """FLOPs and calls of these pictures, of `Lab.draw`: a cache that decides by itself computes more or less on others."""
    rounds: list[dict[str, Any]] = field(default_factory=list)
    """What `Lab.timed` found, round by round and picture by picture."""


def take_turns(lab: Lab, cases: Sequence[Case], items: Sequence[Item], repeats: int, meter: Meter) -> list[Timed | str]:
    """Time every case on every item. The round before those that count warms up, and is watched for what it computes.

    Args:
        cases: the baseline first.
        repeats: rounds that count.

    Returns:
        What was seen of each case, or why it failed.

    Raises:
        Exception: the baseline fails.
    """
    found: list[Timed | str] = []
    for number, case in enumerate(cases):
        meter.at(f"timing, warm-up: {case.label}, {case.steps} steps, {number + 1} of {len(cases)} in turns")
        try:
            found.append(Timed(lab.draw(case, items, 1, lambda first, count: None)[1]))
        except Exception as error:
            if number == 0:
                raise
            found.append(one_line(error))
        finally:
            meter.advance(case.steps * len(items))
    for turn in range(repeats):
        for item in items:
            for number, case in enumerate(cases):
                found[number] = _one_more(
                    found[number], lab, case, item, number == 0, meter, f"{turn + 1} of {repeats}"
                )
    return found


def _one_more(seen: Timed | str, lab: Lab, case: Case, item: Item, must: bool, meter: Meter, turn: str) -> Timed | str:
    """`seen` with one more call in it; a case that has failed is left alone."""
    meter.at(f"timing, round {turn}: {case.label}, {case.steps} steps")
    try:
        if isinstance(seen, Timed):
            seen.rounds.append(lab.timed(case, item))
    except Exception as error:
        if must:
            raise
        return one_line(error)
    finally:
        meter.advance(case.steps)
    return seen


def summarise_turns(case: Timed, baseline: Timed) -> dict[str, Any]:
    """Median and spread of one case's times, and of its speed-up over the baseline's call of the same round and prompt; and
    FLOPs and calls of the pictures that were timed."""
    times = case.rounds
    seconds = {stage: [one["seconds"][stage] for one in times] for stage in STAGES}
    speedups = {
        stage: [
            base["seconds"][stage] / one["seconds"][stage] for base, one in zip(baseline.rounds, times, strict=True)
        ]
        for stage in ("denoise", "end_to_end")
    }
    peaks = [one["peak_memory"] for one in times if one["peak_memory"] is not None]
    held = [one["bytes_held"] for one in times if one["bytes_held"] is not None]
    return {
        "seconds": {stage: spread(values) for stage, values in seconds.items()},
        "speedup": {stage: spread(values) for stage, values in speedups.items()},
        "flops": case.took["flops"],
        "calls": case.took["calls"],
        "flops_ratio": flops_ratio(baseline.took, case.took),
        "peak_memory": max(peaks) if peaks else None,
        "bytes_held": max(held) if held else None,
    }


def flops_ratio(baseline: dict[str, Any], case: dict[str, Any]) -> float | None:
    """The baseline's FLOPs over the case's, of what `Lab.draw` said that they took; None where they are not known."""
    full, spent = baseline.get("flops"), case["flops"]
    return round(full / spent, 4) if isinstance(full, int) and isinstance(spent, int) and spent else None


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, least, most, and how many."""
    return {
        "median": float(f"{statistics.median(values):.5g}"),
        "least": float(f"{min(values):.5g}"),
        "most": float(f"{max(values):.5g}"),
        "samples": len(values),
    }
