"""Timing in turns: the baseline and a group of cases, one call each a round, so that a drift of the machine hits them all."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from .cases import Case
from .errors import one_line
from .lab import Item, Lab
from .meter import Meter

STAGES = ("encode", "denoise", "decode", "end_to_end")


def take_turns(
    lab: Lab, cases: Sequence[Case], items: Sequence[Item], repeats: int, meter: Meter
) -> list[list[dict[str, Any]] | str]:
    """Time every case on every item.

    Args:
        cases: the baseline first.
        repeats: rounds that count; one round before them is dropped.

    Returns:
        For each case what `Lab.timed` found, round by round and item by item; or why the case failed.

    Raises:
        Exception: the baseline fails.
    """
    found: list[list[dict[str, Any]] | str] = [[] for _ in cases]
    for turn in range(-1, repeats):
        for item in items:
            for number, case in enumerate(cases):
                times = found[number]
                round_ = "warm-up" if turn < 0 else f"round {turn + 1} of {repeats}"
                meter.at(f"timing, {round_}: {case.label}, {case.steps} steps, {number + 1} of {len(cases)} in turns")
                if isinstance(times, str):
                    meter.advance(case.steps)
                    continue
                try:
                    one = lab.timed(case, item)
                except Exception as error:
                    if number == 0:
                        raise
                    found[number] = one_line(error)
                    continue
                finally:
                    meter.advance(case.steps)
                if turn >= 0:
                    times.append(one)
    return found


def summarise_turns(times: Any, baseline: Any) -> dict[str, Any]:
    """Median and spread of one case's times, and of its speed-up over the baseline's call of the same round and prompt."""
    seconds = {stage: [one["seconds"][stage] for one in times] for stage in STAGES}
    speedups = {
        stage: [base["seconds"][stage] / one["seconds"][stage] for base, one in zip(baseline, times, strict=True)]
        for stage in ("denoise", "end_to_end")
    }
    peaks = [one["peak_memory"] for one in times if one["peak_memory"] is not None]
    held = [one["bytes_held"] for one in times if one["bytes_held"] is not None]
    return {
        "seconds": {stage: spread(values) for stage, values in seconds.items()},
        "speedup": {stage: spread(values) for stage, values in speedups.items()},
        "peak_memory": max(peaks) if peaks else None,
        "bytes_held": max(held) if held else None,
    }


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, least, most, and how many."""
    return {
        "median": float(f"{statistics.median(values):.5g}"),
        "least": float(f"{min(values):.5g}"),
        "most": float(f"{max(values):.5g}"),
        "samples": len(values),
    }
