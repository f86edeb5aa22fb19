"""`ChituBench/result.md` says what the stored results say."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).resolve().parent.parent / "ChituBench"


@pytest.fixture(scope="module")
def report() -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCH / "scripts"))  # as for a script
    spec = importlib.util.spec_from_file_location("report", BENCH / "scripts" / "report.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(BENCH / "scripts"))


def test_the_page_is_what_the_results_make(report: ModuleType) -> None:
    assert report.page() == (BENCH / "result.md").read_text(encoding="utf-8"), "run ChituBench/scripts/report.py"


def test_the_readme_has_the_headline_that_the_results_make(report: ModuleType) -> None:
    text = report.README.read_text(encoding="utf-8")
    assert report.readme() == text, "run ChituBench/scripts/report.py"


def test_another_number_makes_another_headline_and_no_data_no_row(report: ModuleType) -> None:
    headline = report.report_readme.headline
    found = report.report_readme.stored(BENCH / "results", report._read)
    nothing = dict.fromkeys(found)
    assert headline(nothing).count("\n") == 1, "only the heads of the columns"
    for name, data in found.items():
        one = headline({**nothing, name: data})
        assert data is None or one.count("\n") > 1, name
    changed = copy.deepcopy(found["overhead"])
    changed["compiled"]["skipped step"]["ms"] += 1
    assert headline({**found, "overhead": changed}) != headline(found)
    # Caches at equal compute: the planned cache's row follows its cases.
    nearer = copy.deepcopy(found["flexcache"])
    for case in nearer["cases"]:
        if case["case"]["family"] == "planned":
            case["quality"]["metrics"]["psnr"]["mean"] += 1
    rows = [[line for line in headline({**found, "flexcache": data}).splitlines() if line.startswith("| the planned")]
            for data in (found["flexcache"], nearer)]  # fmt: skip
    assert len(rows[0]) == 2 and rows[0] != rows[1]


@pytest.mark.parametrize("name", ["overhead", "attention", "parallel_x2", "planned_ablation"])
def test_another_number_makes_another_page(report: ModuleType, name: str) -> None:
    data = json.loads((BENCH / "results" / f"{name}.json").read_text(encoding="utf-8"))
    changed = copy.deepcopy(data)
    if name == "overhead":
        changed["compiled"]["unhooked"]["ms"] += 1
    elif name == "parallel_x2":
        changed["shapes"]["flux-1024"]["one GPU, diffusers"]["ms"] += 10
    elif name == "planned_ablation":
        changed["rows"][0]["psnr"] += 1
    else:
        changed["shapes"][0]["kernels"]["sdpa_cudnn"]["tflops"] -= 100
    sections = {"parallel_x2": report.report_gpus.section, "planned_ablation": report.report_planned.section}
    section = sections.get(name) or getattr(report, name)
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


@pytest.mark.slow
def test_model_shapes_run_dry_and_make_a_section(report: ModuleType, tmp_path: Path) -> None:
    """SD3.5 is the shape with no list of repeated blocks; peers that are not installed are rows that fail."""
    command = [sys.executable, str(BENCH / "scripts" / "model_shapes.py"), "--size", "tiny", "--only", "sd3"]
    environment = {**os.environ, "PYTHONPATH": str(BENCH.parent), "OMP_NUM_THREADS": "1"}
    output = tmp_path / "model_shapes.json"
    subprocess.run([*command, "--output", str(output)], check=True, capture_output=True, env=environment, timeout=300)
    data = json.loads(output.read_text())
    (row,) = data["models"].values()
    assert row["flops_step"] > 0 and data["matmul_tflops"] > 0 and data["what"] == "speed only: random weights"
    for mode in ("eager", "compiled"):
        assert row[mode]["stock"]["ms"] > 0 and row[mode]['attention="auto"']["ms"] > 0
    for cache in ("static", "meancache", "fbcache", "magcache", "easycache", "teacache", "taylorseer", "blockdance"):
        assert row["compiled"][cache]["skipped_steps"] > 0, (cache, row["compiled"][cache])
    text = report.report_shapes.section(data)
    assert "Speed only" in text and "| SD3.5 Large, 1024² |" in text and "| `fbcache` |" in text
    assert report.report_shapes.plot(data, tmp_path / "shapes.png").stat().st_size > 10_000
    assert report.report_shapes.section(None) == ""
