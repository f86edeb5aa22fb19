"""`ChituBench/result.md` says what the stored results say."""

from __future__ import annotations

import copy
import importlib
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


def test_skipped_steps_from_a_dry_run(report: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The script runs on the CPU, tells the front block from the rest, and the page shows what it stored."""
    monkeypatch.syspath_prepend(str(BENCH / "scripts"))
    script = importlib.import_module("skipped_step")
    chosen = {name: script.STRATEGIES[name] for name in ("static hold", "fbcache")}
    stored = tmp_path / "skipped_step.json"
    monkeypatch.setattr(script, "STRATEGIES", chosen)
    arguments = ["skipped_step.py", "--size", "tiny", "--rounds", "1", "--no-compile", "--output", str(stored)]
    monkeypatch.setattr("sys.argv", arguments)
    script.main()
    data = json.loads(stored.read_text())
    held, front = data["eager"]["static hold"], data["eager"]["fbcache"]
    assert held["front_ms"] == 0 and held["reads"] == 0 and held["beyond_ms"] == held["skipped_ms"] > 0
    assert front["front_ms"] > 0 and front["reads"] == 1
    assert front["beyond_ms"] == pytest.approx(front["skipped_ms"] - front["front_ms"])
    assert data["command"] == " ".join(arguments) and data["versions"]["torch"] and data["machine"]
    section = report.skipped_step(data)
    assert all(f"| `{name}` |" in section for name in chosen) and f"{front['front_ms']:.2f} |" in section
    data["eager"]["static hold"]["beyond_ms"] = 99.0
    assert "`static hold` eager (beyond_ms 99)" in report.skipped_step(data)
