"""Families of cases side by side at equal counted FLOPs, read off their curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .kinds import OURS, PEERS
from .tables import complete, psnr_of

RATIOS = (1.5, 2.0, 3.0, 5.0)
"""The baseline's FLOPs over the case's, at which families are compared."""
BEYOND = 1.13
"""So far past its first and its last case a curve is drawn on along the slope there; such a number is set in italics."""
EXACT = 100.0
"""PSNR of equal pictures, dB; such a case is on no curve."""


def table(cases: Sequence[dict[str, Any]], ratios: Sequence[float] = RATIOS) -> str:
    """Mean PSNR of each family at equal FLOPs as Markdown, best first; empty if there are fewer than two families.

    A curve runs straight through the family's cases over the logarithm of the FLOPs ratio. Where two settings of a family
    cost the same, the better one counts.
    """
    curves = {family: curve(cases, family) for family in dict.fromkeys(c["case"]["family"] for c in cases)}
    values = {family: [value_at(points, ratio) for ratio in ratios] for family, points in curves.items()}
    values = {family: row for family, row in values.items() if any(row)}
    if len(values) < 2:
        return ""
    kinds = {case["case"]["family"]: case["case"]["kind"] for case in cases}
    best = [max((found[0] for found in column if found), default=None) for column in zip(*values.values(), strict=True)]
    lines = ["| PSNR, dB, at FLOPs ÷ | by | " + " | ".join(f"{ratio:g}" for ratio in ratios) + " |"]
    lines.append("|---|---|" + "---|" * len(ratios))
    for family, row in sorted(values.items(), key=lambda item: -max(found[0] for found in item[1] if found)):
        cells = [_cell(found, top) for found, top in zip(row, best, strict=True)]
        lines.append(f"| {family} | {maker(kinds[family])} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def maker(kind: str) -> str:
    """Who made it; what needs no cache is free."""
    return kind if kind in PEERS else "Chitu" if kind in OURS else "free"


def curve(cases: Sequence[dict[str, Any]], family: str) -> list[tuple[float, float]]:
    """(logarithm of the FLOPs ratio, mean PSNR in dB) of the family's cases, in order."""
    found: dict[float, float] = {}
    for case in cases:
        if case["case"]["family"] != family or not complete(case) or not case["quality"]["flops_ratio"]:
            continue
        ratio, psnr = case["quality"]["flops_ratio"], psnr_of(case)["mean"]
        if psnr < EXACT:
            found[math.log(ratio)] = max(psnr, found.get(math.log(ratio), -math.inf))
    return sorted(found.items())


def value_at(points: Sequence[tuple[float, float]], ratio: float) -> tuple[float, bool] | None:
    """PSNR of a curve at a FLOPs ratio, and whether it lies between two cases rather than past them; None if too far."""
    at, margin = math.log(ratio), math.log(BEYOND)
    if len(points) < 2 or not points[0][0] - margin <= at <= points[-1][0] + margin:
        return None
    within = points[0][0] <= at <= points[-1][0]
    right = min(max(1, sum(x < at for x, _ in points)), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0), within


def _cell(found: tuple[float, bool] | None, best: float | None) -> str:
    if found is None:
        return ""
    text = f"{found[0]:.1f}" if found[1] else f"*{found[0]:.1f}*"
    return f"**{text}**" if found[0] == best else text
