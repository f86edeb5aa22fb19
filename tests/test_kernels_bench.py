"""The attention bench: it measures what it says, keeps what it has when time runs out, and fills the table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from chitu_diffusion.attention import fastest
from chitu_diffusion.attention.fastest import Row, read_rows
from chitu_diffusion.bench import attention as bench
from chitu_diffusion.bench.attention_plot import plot
from chitu_diffusion.bench.timing import Budget, in_turns, store, summary
from chitu_diffusion.cli.bench import register

ROOT = Path(__file__).resolve().parent.parent


def test_candidates_run_in_turns() -> None:
    order: list[str] = []
    work = {name: (lambda name=name: order.append(name)) for name in "ab"}
    samples = in_turns(work, torch.device("cpu"), rounds=3, calls=2, warmup=1)
    assert order == [*"ab", *"aabb" * 3]
    assert {name: len(times) for name, times in samples.items()} == {"a": 3, "b": 3}


def test_summary() -> None:
    numbers = summary([4.0, 1.0, 2.0, 3.0, 100.0])
    assert numbers["median_ms"] == 3.0 and numbers["samples"] == 5
    assert numbers["quartiles_ms"][0] < 3.0 < numbers["quartiles_ms"][1]
    assert summary([7.0])["quartiles_ms"] == [7.0, 7.0]


def test_a_budget_leaves_out_and_says_so() -> None:
    budget = Budget(10.0)
    assert budget.allows("short", 1.0) and not budget.allows("long", 100.0)
    assert budget.skipped[0].startswith("long: takes about 100 s, and 10 s are left")


def test_flops() -> None:
    """FLUX at 1024²: 57 layers of 0.261 TFLOP are the 14.87 TFLOP of attention in a step."""
    assert round(57 * bench.SHAPES["FLUX 1024²"].flops / 1e12, 2) == 14.87


def numbers(tflops: float) -> dict[str, Any]:
    return {"median_ms": 1.0, "quartiles_ms": [0.9, 1.1], "samples": 3, "tflops": tflops, "ratio_to_stock": 1.0}


def test_a_grid_becomes_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "fastest.yaml"
    path.write_text("# header\nrows: []\n")
    monkeypatch.setattr(fastest, "FILE", path)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    old = Row("9.0", "float16", 64, 256, ("sdpa_flash",))
    stale, other = Row("9.0", "bfloat16", 32, 256, ("sdpa_flash",)), Row("8.0", "bfloat16", 64, 256, ("sdpa_flash",))
    fastest.write_rows("9.0", [old, stale])
    fastest.write_rows("8.0", [other])
    grid = [
        {"dtype": "bfloat16", "D": 64, "S": 256, "kernels": {"fa3": numbers(9), "sdpa_cudnn": numbers(8)}},
        {"dtype": "bfloat16", "D": 128, "S": 256, "kernels": {}},
    ]
    bench.write_table(grid, [], torch.device("cuda"))
    assert sorted(read_rows(), key=str) == sorted(
        [other, old, Row("9.0", "bfloat16", 64, 256, ("fa3", "sdpa_cudnn"))], key=str
    )
    before = path.read_text()
    bench.write_table([], [], torch.device("cpu"))
    assert path.read_text() == before, "a CPU has no place in the table"


def test_a_ragged_shape_counts_in_its_bucket() -> None:
    """cuDNN and FlashAttention-3 are even at a round length, and a fifth apart at SD3.5's 4,250 tokens."""
    grid = [
        {"dtype": "bfloat16", "D": 64, "S": 1024, "kernels": {"sdpa_cudnn": numbers(414), "fa3": numbers(366)}},
        {"dtype": "bfloat16", "D": 64, "S": 4096, "kernels": {"sdpa_cudnn": numbers(465.2), "fa3": numbers(464.9)}},
        {"dtype": "bfloat16", "D": 64, "S": 16384, "kernels": {"sdpa_cudnn": numbers(510), "fa3": numbers(487)}},
    ]
    ragged = {"sage": numbers(999), "sdpa_cudnn": numbers(401), "fa3": numbers(502)}
    shapes = [{"dtype": "bfloat16", "D": 64, "S": 4250, "kernels": ragged}]
    rows = bench.table_rows(grid, shapes, "9.0")
    assert [row.kernels[0] for row in rows] == ["sdpa_cudnn", "fa3", "sdpa_cudnn"]
    assert [row.kernels[0] for row in bench.table_rows(grid, [], "9.0")] == ["sdpa_cudnn"] * 3


def test_it_measures_stores_and_draws(tmp_path: Path) -> None:
    shipped = fastest.FILE.read_text()
    lines: list[str] = []
    result = bench.bench_attention(tmp_path, write=True, quick=True, tiny=True, tell=lines.append)
    stored = json.loads((tmp_path / "attention.json").read_text())
    assert stored == json.loads(json.dumps(result))
    assert set(stored) >= {"machine", "versions", "commit", "command", "shapes", "grid", "unusable", "skipped"}
    for row in stored["shapes"]:
        assert {"sdpa_flash", "sdpa_math", "diffusers:native"} <= set(row["kernels"])
        found = row["kernels"]["sdpa_flash"]
        flops = 4 * row["B"] * row["H"] * row["S"] ** 2 * row["D"]
        assert found["tflops"] == pytest.approx(flops / found["median_ms"] / 1e9)
    assert len(stored["grid"]) == len(bench.TINY_DIMS) * len(bench.TINY_LENGTHS)
    for row in stored["grid"]:
        times = [found["median_ms"] for found in row["kernels"].values()]
        assert times == sorted(times) and not any(name.startswith("diffusers:") for name in row["kernels"])
    if not torch.cuda.is_available():
        assert fastest.FILE.read_text() == shipped
    assert lines and (tmp_path / "fastest.yaml").is_file()
    (picture,) = plot(tmp_path / "attention.json", tmp_path)
    assert picture.stat().st_size > 5000


def test_pictures_of_steps(tmp_path: Path) -> None:
    stored = {
        "machine": {"gpu": "some GPU"},
        "versions": {"torch": "2"},
        "steps": [
            {"mode": mode, "candidates": {"stock": numbers(0), "auto": numbers(0)}} for mode in ("eager", "compiled")
        ],
    }
    store(tmp_path / "attention.json", stored)
    (picture,) = plot(tmp_path / "attention.json", tmp_path / "plots")
    assert picture.name == "attention_steps.png" and picture.stat().st_size > 5000


def test_a_kernel_that_fails_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    candidates, _ = bench.usable_kernels(True)

    class Fails(type(candidates["sdpa_math"])):  # type: ignore[misc]
        def run(self, *args: Any) -> Any:
            raise RuntimeError("no such plan\nmore")

    found, reasons = bench.measure(
        bench.TINY_SHAPES["tiny"], torch.bfloat16, torch.device("cpu"), {"a": candidates["sdpa_math"], "b": Fails()}, 1
    )
    assert list(found) == ["a"] and reasons == {"b": "RuntimeError: no such plan"}


def test_command_line(tmp_path: Path) -> None:
    app = typer.Typer()
    register(app)
    done = CliRunner().invoke(app, ["bench", "attention", "--quick", "--output", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "TFLOP/s" in done.output and (tmp_path / "attention.json").is_file()


@pytest.mark.slow
def test_the_whole_script_runs_dry(tmp_path: Path) -> None:
    script = ROOT / "ChituBench/scripts/attention.py"
    command = [sys.executable, script, "--size", "tiny", "--rounds", "1", "--write", "--output", tmp_path]
    done = subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    stored = json.loads((tmp_path / "attention.json").read_text())
    assert [row["mode"] for row in stored["steps"]] == ["eager", "compiled"]
    for row in stored["steps"]:
        assert set(row["candidates"]) == {"stock", "auto", "diffusers' _native_math", "sdpa_math", "sdpa_flash"}
        assert row["candidates"]["stock"]["ratio_to_stock"] == 1.0
        assert row["chosen"]["sdpa_math"]["kernel"] == "sdpa_math"
    assert {path.name for path in tmp_path.glob("*.png")} == {"attention_kernels.png", "attention_steps.png"}


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
