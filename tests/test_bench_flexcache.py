"""``chitu bench flexcache`` on a tiny pipeline: what is stored, what is not done twice, and what goes wrong in one line."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tiny_text
from typer.testing import CliRunner, Result

from chitu_diffusion.bench.files import write_json
from chitu_diffusion.bench.flexcache import Bench
from chitu_diffusion.bench.pace import Pace
from chitu_diffusion.bench.plan import Plan
from chitu_diffusion.bench.results import summary
from chitu_diffusion.cli.main import app
from chitu_diffusion.runtime import DiffusionTask

ROOT = Path(__file__).resolve().parent.parent
CASES = """
steps: 6
cases:
  - {use: static, params: {steps: uniform}, vary: {budget: [3, 6]}, quick: true}
  - {kind: attention, use: sdpa_math}
  - {kind: coarser grid, params: {count: 6}}
  - {kind: coarser grid, params: {count: 3}}
  - {kind: fewer steps, params: {count: 3}}
  - {use: magcache, params: {constants: measured, threshold: 10.0, retention: 0.1}}
  - {use: planned, params: {profile: measured, budget: 0.5}}
  - {kind: diffusers, use: first_block_cache, params: {threshold: 0.5}}
  - {kind: diffusers, use: magcache}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_text.save("flux", tmp_path_factory.mktemp("model") / "flux")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "cases.yaml").write_text(CASES)
    (folder / "prompts.txt").write_text("a cat\na dog\na very big fish\n")
    return folder


def words(model: Path, inputs: Path, output: Path) -> list[str]:
    return [
        *("bench", "flexcache", "--model", str(model), *tiny_text.SIZES["flux"], "--guidance", "3"),
        *("--cases", str(inputs / "cases.yaml"), "--prompts", str(inputs / "prompts.txt"), "--output", str(output)),
    ]


def chitu(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def records(folder: Path, what: str = "cases") -> dict[str, Any]:
    found = [json.loads(path.read_text()) for path in (folder / what).glob("*.json")]
    return {record["case"]["label"] if what == "cases" else record["id"]: record for record in found}


@pytest.fixture(scope="module")
def done(model: Path, inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("bench") / "results"
    result = chitu(*words(model, inputs, output), "--seeds", "0,1", "--batch", 4)
    assert result.exit_code == 0, result.output
    return output


def test_every_case_is_measured_and_compared(done: Path) -> None:
    cases = records(done)
    assert len(cases) == 10
    failed = {label for label, record in cases.items() if record["error"]}
    assert failed == {"diffusers magcache"}, "a peer that fails is a row that says how"
    assert "`mag_ratios` must be provided" in cases["diffusers magcache"]["error"]
    for record in cases.values():
        if record["error"] is None:
            assert record["timing"]["speedup"]["denoise"]["samples"] == 3
            assert record["quality"]["metrics"]["psnr"]["pictures"] == 6
            assert {"machine", "versions", "commit", "command"} <= set(record)
    half = cases["static steps=uniform, budget=3"]["quality"]
    assert list(half["calls"].values()) == 2 * [{"full": 3.0, "skipped": 3.0}]
    assert 1.8 < half["flops_ratio"] < 2 and half["metrics"]["psnr"]["worst"] < 60
    assert cases["fewer steps count=3"]["quality"]["flops_ratio"] == 2
    assert cases["magcache constants=measured, threshold=10.0, retention=0.1"]["quality"]["flops_ratio"] > 1
    planned = cases["planned profile=measured, budget=0.5"]["quality"]
    assert planned["flops_ratio"] == 2 and len(list(done.glob("profile-6-*.safetensors"))) == 1
    # Of random weights no forecast can be expected to be good: its plan reckons with a trained model's drift.
    assert planned["metrics"]["psnr"]["mean"] > cases["fewer steps count=3"]["quality"]["metrics"]["psnr"]["mean"]


def test_what_skips_nothing_is_equal(done: Path) -> None:
    """Also the coarser grid with every sigma: it is the baseline's own schedule."""
    for label in ("static steps=uniform, budget=6", "coarser grid count=6"):
        quality = records(done)[label]["quality"]
        assert quality["metrics"]["psnr"]["worst"] == 100 and quality["metrics"]["latent_rel_l2"]["worst"] == 0
        assert quality["flops_ratio"] == 1


def test_an_attention_kernel_is_a_case(done: Path) -> None:
    quality = records(done)["attention sdpa_math"]["quality"]
    assert quality["metrics"]["psnr"]["worst"] > 90 and quality["flops_ratio"] == 1
    assert list(quality["calls"].values()) == 2 * [{"full": 6.0}]


def test_coupled_cases_are_drawn_one_by_one(done: Path) -> None:
    cases = records(done)
    assert cases["static steps=uniform, budget=3"]["quality"]["batch"] == 4
    assert cases["diffusers first_block_cache threshold=0.5"]["quality"]["batch"] == 1


def test_what_is_stored_is_not_measured_again(done: Path, model: Path, inputs: Path) -> None:
    before = {label: (record["time"], record["timing"]) for label, record in records(done).items()}
    lost = next((done / "cases").glob(f"{records(done)['fewer steps count=3']['id']}.json"))
    record = json.loads(lost.read_text())
    write_json(lost, {**record, "quality": None})  # as an interrupted bench leaves it
    result = chitu(*words(model, inputs, done), "--seeds", "0,1", "--batch", 4)
    assert result.exit_code == 0, result.output
    drawn = [line for line in result.output.splitlines() if line.startswith(("drew", "timed"))]
    assert len(drawn) == 1 and drawn[0].startswith("drew fewer steps count=3"), drawn
    after = {label: (record["time"], record["timing"]) for label, record in records(done).items()}
    failed = "diffusers magcache"
    assert {k: v for k, v in after.items() if k != failed} == {k: v for k, v in before.items() if k != failed}
    assert json.loads(lost.read_text())["quality"]["metrics"] == record["quality"]["metrics"]


def test_collect_never_mixes_baselines(done: Path, model: Path, inputs: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    result = chitu(*words(model, inputs, other), "--quick", "--guidance", "4", "--peers", "none")
    assert result.exit_code == 0, result.output
    assert {record["case"]["use"] for record in records(other).values()} == {"static"}
    (one,), (two,) = records(done, "baselines"), records(other, "baselines")
    assert one != two
    result = chitu("bench", "collect", done, other, "--output", tmp_path / "all")
    assert result.exit_code == 0, result.output
    names = {path.name for path in (tmp_path / "all").iterdir()}
    assert {"flexcache.json", "flexcache.md", "flexcache_tradeoff.png", "flexcache_sheet.png"} <= names
    data = json.loads((tmp_path / "all" / "flexcache.json").read_text())
    assert [b["id"] for b in data["baselines"]] == [one, two] and len(data["cases"]) == 12
    assert (tmp_path / "all" / "flexcache.md").read_text().count("| baseline |") == 2
    assert "samples" not in json.dumps(data["cases"][0]["quality"])
    again = chitu("bench", "collect", tmp_path / "all" / "flexcache.json", "--output", tmp_path / "again")
    assert again.exit_code == 0, again.output
    assert json.loads((tmp_path / "again" / "flexcache.json").read_text()) == data


def test_collect_puts_sweeps_of_28_and_of_50_steps_side_by_side(done: Path, tmp_path: Path) -> None:
    assert chitu("bench", "collect", done, "--output", tmp_path / "one").exit_code == 0
    text = (tmp_path / "one" / "flexcache.json").read_text()
    (baseline,) = json.loads(text)["baselines"]
    more = json.loads(text.replace(baseline["id"], "longer"))  # as the same command with more steps leaves it
    more["baselines"][0]["content"]["steps"] = 12
    more["baselines"][0]["time"] = "2000-01-01T00:00:00Z"
    for case in more["cases"]:
        case["id"] += "-longer"
    (tmp_path / "longer.json").write_text(json.dumps(more))
    result = chitu("bench", "collect", tmp_path / "longer.json", done, "--output", tmp_path / "both")
    assert result.exit_code == 0, result.output
    both = json.loads((tmp_path / "both" / "flexcache.json").read_text())
    assert [one["content"]["steps"] for one in both["baselines"]] == [6, 12]
    assert len(both["cases"]) == 2 * len(more["cases"])
    pictures = {path.name for path in (tmp_path / "both").glob("*.png")}
    assert pictures == {"flexcache_tradeoff.png", "flexcache_sheet.png"}, "one picture with a panel for each"


def test_groups_are_as_large_as_the_time_allows() -> None:
    bench = object.__new__(Bench)
    bench.plan = Plan(task=DiffusionTask(prompts=("a cat",)), seeds=(0,), cases=(), output=Path("nowhere"))
    bench.begun, bench.missing_seconds = time.monotonic(), None
    for pace, seconds, count in (
        (0.01, float("inf"), 8),  # 28 steps x 4 calls: 1.1 s a case
        (0.2, float("inf"), 7),  # 22 s a case: 8 of them, the baseline one, are 180 s
        (2.0, float("inf"), 4),  # not fewer, though they take long: each group has its baseline
        (0.2, 60.0, 1),
        (0.2, 30.0, 0),
    ):
        bench.pace, bench.plan = Pace(pace), dataclasses.replace(bench.plan, seconds=seconds)
        assert bench.together(28) == count, (pace, seconds)
    assert bench.missing_seconds == pytest.approx(44.8)


def test_our_best_case_at_half_the_flops_has_a_row_in_the_readme(done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "ChituBench" / "scripts")
    import report_readme

    (row,) = report_readme.caches(summary([done]))
    assert len(row) == len(report_readme.COLUMNS) and "PSNR" in row[7] and "no cache" in row[4]
    ours = [case for case in records(done).values() if case["case"]["kind"] == "chitu" and case["quality"]]
    half = [case for case in ours if case["quality"]["flops_ratio"] >= 1.9]
    best = max(half, key=lambda case: case["quality"]["metrics"]["psnr"]["mean"])
    assert row[0].startswith(f"flux model: {best['case']['label']}") and len(half) > 1, row


def test_nothing_is_begun_that_does_not_fit(model: Path, inputs: Path, tmp_path: Path) -> None:
    output = tmp_path / "results"
    result = chitu(*words(model, inputs, output), "--quick", "--minutes", 1e-4)
    assert result.exit_code == 0, result.output
    assert "does not fit; the same command continues" in " ".join(result.output.split())
    assert records(output) == {}
    enough = chitu(*words(model, inputs, output), "--quick", "--minutes", 5, "--lpips")
    assert enough.exit_code == 0 and "does not fit" not in enough.output, enough.output
    assert all(record["quality"] and record["timing"] for record in records(output).values()) and records(output)
    measured = all("lpips" in record["quality"]["metrics"] for record in records(output).values())
    assert measured or "LPIPS is left out" in enough.output, "it goes on without, and says so"


@pytest.mark.parametrize(
    ("prompts", "told"),
    [(b"\n \n", "is empty"), (b"a caf\xe9\n", "is not UTF-8 text")],
    ids=["empty", "latin-1"],
)
def test_a_prompts_file_that_cannot_be_used(prompts: bytes, told: str, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_bytes(prompts)
    ended(tmp_path, f"{tmp_path}/prompts.txt' {told}", "--prompts", tmp_path / "prompts.txt")


def test_an_unknown_strategy(tmp_path: Path) -> None:
    (tmp_path / "cases.yaml").write_text("cases: [{use: teacahe}]")
    ended(tmp_path, "no cache 'teacahe'; nearest: teacache", "--cases", tmp_path / "cases.yaml")


def test_results_of_another_version(inputs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "bench.json").write_text('{"format": 0, "bench": "flexcache"}')
    (folder / "kept.json").write_text("{}")
    ended(tmp_path, "is of another version", "--quick", "--output", folder)
    assert {path.name for path in folder.iterdir()} == {"bench.json", "kept.json"}
    done = chitu("bench", "collect", folder, "--output", tmp_path / "all")
    assert done.exit_code == 2 and "is of another version" in done.output and not (tmp_path / "all").exists()


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "photo.png").write_bytes(b"")
    ended(tmp_path, "is no folder of results, and not empty", "--quick", "--output", tmp_path)


def ended(cwd: Path, told: str, *arguments: object) -> None:
    """The command says `told` on one line and ends with 2, without a traceback."""
    done = subprocess.run(
        [sys.executable, "-m", "chitu_diffusion.cli.main", "bench", "flexcache", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("chitu: ")]
    assert told in line and "Traceback" not in done.stderr


def test_an_interrupt_keeps_what_was_measured(model: Path, inputs: Path, tmp_path: Path) -> None:
    output = tmp_path / "results"
    command = [sys.executable, "-m", "chitu_diffusion.cli.main", *words(model, inputs, output)]
    bench = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    deadline = time.monotonic() + 300
    while not list(output.glob("cases/*.json")) and bench.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    bench.send_signal(signal.SIGINT)
    told = bench.communicate(timeout=120)[1]
    assert bench.returncode == 130, told
    (line,) = [line for line in told.splitlines() if line.startswith("chitu: ")]
    assert str(output) in line and "the same command continues" in line
    assert "Traceback" not in told
    assert records(output) and list(output.rglob("*.part")) == []


def test_a_full_disk_loses_nothing(done: Path, model: Path, inputs: Path, tmp_path: Path) -> None:
    """Files of more than some bytes cannot be written, as on a full disk: the baseline's pictures are the first."""
    output = tmp_path / "results"
    limit = 8192

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    command = [sys.executable, "-m", "chitu_diffusion.cli.main", *words(model, inputs, output), "--quick"]
    full = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, preexec_fn=small_files
    )
    assert full.returncode == 2, full.stderr
    (line,) = [line for line in full.stderr.splitlines() if line.startswith("chitu: ")]
    assert "cannot be written" in line and "the same command continues" in line and "Traceback" not in full.stderr
    assert list(output.rglob("*.part")) == []
    timed = {label: record["timing"] for label, record in records(output).items()}
    assert timed and all(timed.values()), "what was measured before is there"
    enough = chitu(*words(model, inputs, output), "--quick")
    assert enough.exit_code == 0, enough.output
    assert {label: record["timing"] for label, record in records(output).items()} == timed
    assert all(record["quality"] for record in records(output).values())
