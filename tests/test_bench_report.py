"""`ChituBench/result.md` says what the stored results say."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).resolve().parent.parent / "ChituBench"


@pytest.fixture(scope="module")
def report() -> ModuleType:
    spec = importlib.util.spec_from_file_location("report", BENCH / "scripts" / "report.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_results_make(report: ModuleType) -> None:
    assert report.page() == (BENCH / "result.md").read_text(encoding="utf-8"), "run ChituBench/scripts/report.py"


@pytest.mark.parametrize("name", ["overhead", "attention", "parallel"])
def test_another_number_makes_another_page(report: ModuleType, name: str) -> None:
    data = json.loads((BENCH / "results" / f"{name}.json").read_text(encoding="utf-8"))
    changed = copy.deepcopy(data)
    if name == "overhead":
        changed["compiled"]["unhooked"]["ms"] += 1
    elif name == "parallel":
        changed["runs"][0]["shapes"]["flux-1024"]["one GPU, diffusers"]["ms"] += 10
    else:
        changed["shapes"][0]["kernels"]["sdpa_cudnn"]["tflops"] -= 100
    section = getattr(report, name)
    assert section(changed) != section(data)
