"""``chitu bench flexcache --workers``: what several processes draw is what one draws, and when they begin something."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors
import tiny_text
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner, Result

from chitu_diffusion.bench.cases import Case
from chitu_diffusion.bench.files import drop_halves, write_json, write_whole
from chitu_diffusion.bench.flexcache import Bench
from chitu_diffusion.bench.lab import Lab
from chitu_diffusion.bench.pace import RECENT, Pace
from chitu_diffusion.bench.parts import Piece, parts_of
from chitu_diffusion.bench.results import summary
from chitu_diffusion.bench.tables import section
from chitu_diffusion.cli.main import app
from chitu_diffusion.runtime import DiffusionTask
from chitu_diffusion.runtime.generator import with_defaults

ROOT = Path(__file__).resolve().parent.parent
CASES = """
steps: 6
cases:
  - {use: static, params: {steps: uniform}, vary: {budget: [3, 6]}}
  - {use: fbcache, params: {threshold: 0.3}}
  - {kind: fewer steps, params: {count: 3}}
  - {use: planned, params: {profile: measured, budget: 0.5}}
"""
PROMPTS = ("a cat", "a dog", "a very big fish")
ADAPTIVE = "fbcache threshold=0.3"


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, cases and prompts."""
    folder = tmp_path_factory.mktemp("given")
    tiny_text.save("flux", folder / "flux")
    (folder / "cases.yaml").write_text(CASES)
    (folder / "prompts.txt").write_text("\n".join(PROMPTS))
    return folder


def words(given: Path, output: Path, workers: int) -> list[str]:
    return [
        *("bench", "flexcache", "--model", str(given / "flux"), *tiny_text.SIZES["flux"], "--guidance", "3"),
        *("--cases", str(given / "cases.yaml"), "--prompts", str(given / "prompts.txt"), "--seeds", "0,1"),
        *("--batch", "4", "--repeats", "1", "--output", str(output), "--workers", str(workers)),
    ]


def chitu(arguments: list[str]) -> Result:
    return CliRunner().invoke(app, arguments)


def records(folder: Path) -> dict[str, Any]:
    found = [json.loads(path.read_text()) for path in (folder / "cases").glob("*.json")]
    return {record["case"]["label"]: record for record in found}


def measured(folder: Path) -> dict[str, Any]:
    """All that does not depend on how fast it went."""
    (baseline,) = [json.loads(path.read_text()) for path in (folder / "baselines").glob("*.json")]
    counted = ("flops", "calls", "flops_ratio")
    cases = {
        label: {**one, "quality": one["quality"], "timing": {key: one["timing"][key] for key in counted}}
        for label, one in records(folder).items()
    }
    for one in cases.values():
        for key in ("run", "time", "command", "commit"):
            del one[key]
    return {"took": baseline["took"], "cases": cases}


@pytest.fixture(scope="module")
def alone(given: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("alone") / "results"
    result = chitu(words(given, output, 1))
    assert result.exit_code == 0, result.output
    return output


# -- the timed picture -------------------------------------------------------------------------------------------------


def test_the_timed_picture_has_its_own_flops(alone: Path, given: Path) -> None:
    record = records(alone)[ADAPTIVE]
    task = DiffusionTask(
        prompts=PROMPTS,
        model=str(given / "flux"),
        height=16,
        width=16,
        guidance=3.0,
        arguments={"max_sequence_length": 16},
    )
    lab = Lab(with_defaults(task), alone)
    case = Case(kind="chitu", use="fbcache", params={"threshold": 0.3}, steps=6, family="fbcache")
    took = lab.draw(case, [(PROMPTS[0], 0)], 1, lambda first, count: None)[1]
    assert {key: record["timing"][key] for key in ("flops", "calls")} == {key: took[key] for key in ("flops", "calls")}
    assert record["timing"]["flops"] != record["quality"]["flops"], (
        "the cache computes more of one picture than of another"
    )
    fixed = records(alone)["static steps=uniform, budget=3"]
    assert fixed["timing"]["flops_ratio"] == fixed["quality"]["flops_ratio"] > 1.8


def test_the_table_says_where_the_timed_picture_is_another(alone: Path) -> None:
    found = summary([alone])
    own = {case["case"]["label"]: case for case in found["cases"]}[ADAPTIVE]["timing"]["flops_ratio"]
    rows = [line for line in section(found).splitlines() if "timed: " in line]
    assert len(rows) == 1 and ADAPTIVE in rows[0] and f"(timed: {own:.2f})" in rows[0]
    assert "*timed* is that of the pictures whose seconds these are" in section(found)
    for case in found["cases"]:  # as stored before there was one
        for key in ("flops", "calls", "flops_ratio"):
            del case["timing"][key]
    assert "timed" not in section(found) and ADAPTIVE in section(found)


# -- several processes -------------------------------------------------------------------------------------------------


def test_workers_draw_baselines_and_cases_as_one_does(
    alone: Path, given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the first process draws no baseline")

    monkeypatch.setattr(Bench, "baseline_drawn", refuse)
    output = tmp_path / "results"
    result = chitu(words(given, output, 2))
    assert result.exit_code == 0, result.output
    told = [line for line in result.output.splitlines() if line.startswith("drew")]
    assert sum(line.startswith("drew the baseline") for line in told) == 2, "with each number of pictures a call"
    assert len(told) == 2 + 5
    assert measured(output) == measured(alone)
    assert list((output / "tensors").glob("*-from-*")) == []


def test_interrupted_workers_continue_to_the_same_table(alone: Path, given: Path, tmp_path: Path) -> None:
    """Ctrl-C of a terminal goes to all processes of its group."""
    output = tmp_path / "results"
    command = [sys.executable, "-m", "chitu_diffusion.cli.main", *words(given, output, 2)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    bench = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True)
    deadline = time.monotonic() + 300
    while bench.poll() is None and time.monotonic() < deadline:
        if any(record["quality"] for record in records(output).values()):
            break
        time.sleep(0.02)
    os.killpg(bench.pid, signal.SIGINT)
    told = bench.communicate(timeout=120)[1]
    assert bench.returncode == 130, told
    assert "the same command continues" in told and "Traceback" not in told, told
    assert list(output.rglob("*.part")) == []
    done = {label for label, record in records(output).items() if record["quality"]}
    assert 0 < len(done) < 5
    result = chitu(words(given, output, 2))
    assert result.exit_code == 0, result.output
    assert not any(
        line.startswith("drew") and any(label in line for label in done) for line in result.output.splitlines()
    )
    assert measured(output) == measured(alone)


def test_a_worker_that_ends_early_is_told(given: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(ENDS)
    command = [sys.executable, "-m", "chitu_diffusion.cli.main", *words(given, tmp_path / "results", 2)]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("chitu: ")]
    assert "2 of 2 workers ended early; the same command continues" in line


ENDS = """
import os, sys
if "--multiprocessing-fork" in sys.argv:
    os._exit(9)
"""


def test_parts_are_drawn_in_the_calls_of_the_whole() -> None:
    found = [(part.first, part.count) for part in parts_of(28, 16, 48 + 5, 2)]
    assert found == [(0, 32), (32, 21)]
    assert [part.count for part in parts_of(28, 1, 48, 10)] == [5] * 9 + [3]
    assert len(parts_of(28, 16, 8, 10)) == 1


# -- time --------------------------------------------------------------------------------------------------------------


def test_a_piece_is_expected_to_take_what_others_took_beside_it() -> None:
    pace = Pace()
    pace.saw_alone(10, 3.0)
    pace.saw_alone(10, 1.0)
    assert pace.of(16) == 0.1, "no more is known, and it is not multiplied"
    pace.saw_drawn(16, 100, 60.0, first=True)
    assert pace.of(16) == 0.6
    for seconds in (20.0, 30.0, 25.0):
        pace.saw_drawn(16, 100, seconds)
    assert pace.of(16) == 0.3, "the slowest that did not load its kernels meanwhile"
    for _ in range(RECENT):
        pace.saw_drawn(16, 100, 15.0)
    assert pace.of(16) == 0.15, "fewer are at work now"
    assert pace.of(1) == 0.1, "of single pictures nothing has been seen yet"


def test_a_case_is_begun_if_it_fits_at_the_measured_pace(given: Path) -> None:
    bench = object.__new__(Bench)
    bench.pace, bench.begun = Pace(0.1), time.monotonic()
    piece = Piece(steps=28, batch=16, count=48, case=0)
    bench.pace.saw_drawn(16, piece.work, 40.0)
    bench.plan = type("Plan", (), {"seconds": 60.0})()
    assert bench.seconds_for(piece) == pytest.approx(40.0) and bench.has_time_for(piece)
    bench.plan.seconds = 39.0
    assert not bench.has_time_for(piece)


# -- files of constants ------------------------------------------------------------------------------------------------


def test_a_profile_of_an_older_format_is_measured_again(alone: Path, given: Path, tmp_path: Path) -> None:
    output = tmp_path / "results"
    (stored,) = alone.glob("profile-6-*.safetensors")
    name = stored.name
    write_json(output / "bench.json", {"format": 1, "bench": "flexcache"})
    with safetensors.safe_open(stored, framework="np") as opened:
        head = json.loads(opened.metadata()["chitu"])
    save_file(load_file(stored), output / name, metadata={"chitu": json.dumps({**head, "format": 1})})
    result = chitu(words(given, output, 1))
    assert result.exit_code == 0, result.output
    assert {label for label, record in records(output).items() if record["error"]} == set()
    assert f"1 of the results folder's files, {name}" in " ".join(result.output.split())
    assert measured(output) == measured(alone)
    for path in (output / "cases").glob("*.json"):  # nothing is open but the drawing, and the file is stale once more
        write_json(path, {**json.loads(path.read_text()), "quality": None})
    (output / name).write_bytes(b"half a file")
    again = chitu(words(given, output, 2))
    assert again.exit_code == 0, again.output
    assert f"1 of the results folder's files, {name}" in " ".join(again.output.split()), "once, and not in each worker"
    assert measured(output) == measured(alone)


def test_writing_that_is_interrupted_leaves_nothing(tmp_path: Path) -> None:
    def write(half: Path) -> None:
        half.write_text("half")
        raise KeyboardInterrupt

    (tmp_path / "there").write_text("before")
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "there", write)
    assert [path.name for path in tmp_path.iterdir()] == ["there"] and (tmp_path / "there").read_text() == "before"


def test_what_an_ended_process_was_writing_is_removed(tmp_path: Path) -> None:
    """Nobody but the system ends this one: it has no time to tidy up."""
    write = "import os, signal, sys; from pathlib import Path; from chitu_diffusion.bench.files import write_whole\n"
    write += (
        "write_whole(Path(sys.argv[1]), lambda half: (half.write_text('half'), os.kill(os.getpid(), signal.SIGKILL)))"
    )
    ended = subprocess.Popen(
        [sys.executable, "-c", write, str(tmp_path / "cases" / "a.json")], env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert ended.wait(120) == -signal.SIGKILL
    (tmp_path / "cases" / "b.json.1.part").write_text("of another process")
    assert len(list(tmp_path.rglob("a.json.*"))) == 1
    drop_halves(tmp_path, ended.pid)
    assert [path.name for path in (tmp_path / "cases").iterdir()] == ["b.json.1.part"]


def test_another_guidance_has_a_profile_of_its_own(alone: Path, given: Path, tmp_path: Path) -> None:
    output = tmp_path / "results"
    write_json(output / "bench.json", {"format": 1, "bench": "flexcache"})
    (stored,) = alone.glob("profile-6-*.safetensors")
    shutil.copy(stored, output / stored.name)
    result = chitu([*words(given, output, 1), "--guidance", "2"])
    assert result.exit_code == 0, result.output
    assert {label for label, record in records(output).items() if record["error"]} == set()
    assert len(list(output.glob("profile-6-*.safetensors"))) == 2
