"""Families at equal FLOPs, read off the lines between their cases."""

from __future__ import annotations

import math
from typing import Any

import pytest

from chitu_diffusion.bench.equal_flops import curve, maker, table, value_at


def case(family: str, ratio: float, psnr: float, kind: str = "chitu", error: str | None = None) -> dict[str, Any]:
    quality = {"flops_ratio": ratio, "metrics": {"psnr": {"mean": psnr}}}
    return {"case": {"family": family, "kind": kind}, "quality": quality, "timing": {}, "error": error}


def test_a_line_runs_over_the_logarithm_of_the_ratio() -> None:
    points = curve([case("a", 4, 30), case("a", 1, 50), case("b", 2, 99)], "a")
    assert points == [(0.0, 50), (pytest.approx(math.log(4)), 30)]
    assert value_at(points, 2) == (pytest.approx(40), True), "half way in the logarithm"
    assert value_at(points, 4) == (30, True) and value_at(points, 1) == (50, True)


def test_past_the_last_case_only_a_little_way() -> None:
    points = curve([case("a", 2, 40), case("a", 4, 30)], "a")
    found = value_at(points, 4.4)
    assert found is not None and found[0] < 30 and not found[1]
    assert value_at(points, 5) is None and value_at(points, 1.7) is None
    assert value_at(points[:1], 2) is None, "one case is no line"


def test_equal_pictures_and_failed_cases_are_on_no_line_and_the_better_of_two_counts() -> None:
    cases = [case("a", 1, 100), case("a", 2, 40), case("a", 2, 45), case("a", 4, 30), case("a", 3, 10, error="failed")]
    assert [psnr for _, psnr in curve(cases, "a")] == [45, 30]


def test_the_table_has_the_best_first_and_bold_and_tells_who_made_it() -> None:
    cases = [case("ours", 2, 40), case("ours", 3.3, 30), case("theirs", 2, 45, "diffusers"), case("theirs", 3, 20, "diffusers"),
             case("alone", 2, 60)]  # fmt: skip
    lines = table(cases, (2, 3)).splitlines()
    assert lines[0] == "| PSNR, dB, at FLOPs ÷ | by | 2 | 3 |"
    assert lines[2].startswith("| theirs | diffusers | **45.0** | 20.0 |")
    assert lines[3].startswith("| ours | Chitu | 40.0 | **31.9** |") and len(lines) == 4
    assert table(cases[:2]) == "", "one family is not compared"
    assert [maker(kind) for kind in ("attention", "cache-dit", "fewer steps")] == ["Chitu", "cache-dit", "free"]
