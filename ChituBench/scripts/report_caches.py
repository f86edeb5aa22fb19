"""The page's table of strategies that other makers have too, ours minus theirs at equal FLOPs."""

from __future__ import annotations

from typing import Any

from chitu_diffusion.bench.equal_flops import curve, value_at
from chitu_diffusion.bench.tables import complete, groups, title

STATIC = ("static, uniform", "static, growing", "static, growing, linear", "static, growing, damped")
PAIRS = (
    ("fbcache", ("fbcache", "fbcache, warmup 4"), ("diffusers first_block_cache",)),
    ("fbcache", ("fbcache", "fbcache, warmup 4"), ("cache-dit dbcache", "cache-dit dbcache, branches apart")),
    ("static", STATIC, ("cache-dit dbcache, mask", "cache-dit dbcache, mask, taylorseer")),
    ("magcache", ("magcache",), ("diffusers magcache",)),
    (
        "taylorseer",
        ("taylorseer",),
        ("diffusers taylorseer", "diffusers taylorseer, modules", "diffusers taylorseer, lite"),
    ),
    ("taylorseer", ("taylorseer",), ("cache-dit dbcache, taylorseer",)),
    ("pab", ("pab",), ("diffusers pyramid_attention_broadcast",)),
)
"""Strategy; our families of it, and theirs."""
RATIOS = (1.2, 1.5, 2.0, 3.0, 5.0)


def pairs(summary: dict[str, Any]) -> str:
    """A table for each run in which two or more of them were measured; empty where there is none."""
    parts = []
    for baseline, cases in groups(summary):
        done = [case for case in cases if complete(case)]
        families = list(dict.fromkeys(case["case"]["family"] for case in done))
        curves = {family: curve(done, family) for family in families}
        rows = []
        for strategy, own, other in PAIRS:
            ours, theirs = ([f for f in names if f in families] for names in (own, other))
            cells = [_difference(curves, ours, theirs, ratio) for ratio in RATIOS]
            if any(cells):
                rows.append(
                    f"| `{strategy}` | {' or '.join(f'`{name}`' for name in theirs)} | " + " | ".join(cells) + " |"
                )
        if len(rows) > 1:
            head = f"| {title(baseline)}: dB, ours minus theirs, at FLOPs ÷ | theirs | " + " | ".join(map(str, RATIOS))
            parts.append("\n".join([f"{head} |", "|---|---|" + "---|" * len(RATIOS), *rows]))
    return "\n\n".join(parts)


def _difference(curves: dict[str, list[tuple[float, float]]], ours: list[str], theirs: list[str], ratio: float) -> str:
    """Between the nearest settings of both; empty where one of them does not reach so far."""
    best = []
    for families in (ours, theirs):
        found = [value for family in families if (value := value_at(curves[family], ratio)) is not None]
        if not found:
            return ""
        best.append(max(value for value, _ in found))
    return f"{best[0] - best[1]:+.1f}"
