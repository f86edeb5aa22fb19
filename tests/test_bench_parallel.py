"""``chitu bench parallel`` on a tiny pipeline and two gloo ranks: which modes there are, that each is checked, what is stored."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_text
from typer.testing import CliRunner

from chitu_diffusion.bench.errors import BenchError
from chitu_diffusion.bench.parallel_modes import parallel_modes, peer_modes, singles
from chitu_diffusion.bench.parallel_plot import stages_of
from chitu_diffusion.bench.results import Results, summary
from chitu_diffusion.cli.bench_parallel import read_counts
from chitu_diffusion.cli.group import UserError
from chitu_diffusion.cli.main import app

ROOT = Path(__file__).resolve().parent.parent

BROKEN = """
import pathlib
exec(pathlib.Path({adapter!r}).read_text())
from chitu_diffusion.parallel import exchange
exchange.gather = lambda q, k, v, sizes, group, attend, groups: attend(q, k, v)
"""
"""A hook map in whose company gathered attention forgets the keys of the other rank."""


def names(modes: list[Any]) -> list[str]:
    return [mode.name for mode in modes]


def test_every_product_that_takes_all_ranks() -> None:
    assert names(parallel_modes(2, True, None)) == ["ring 2", "gather 2", "ulysses 2", "cfg 2"]
    assert names(parallel_modes(2, False, None)) == ["ring 2", "gather 2", "ulysses 2"]
    four = names(parallel_modes(4, True, "auto"))
    assert {"cfg 2 × ulysses 2", "ulysses 2 × ring 2", "ulysses 2 × gather 2", "gather 4", "cfg 2 × gather 2"} <= set(
        four
    )
    assert len(four) == len(set(four)) == 8
    assert names(parallel_modes(3, True, None)) == ["ring 3", "gather 3", "ulysses 3"]
    assert names(peer_modes(4)) == ["diffusers ring 4", "diffusers ulysses 2 × ring 2", "diffusers ulysses 4"]
    assert [mode.threads for mode in singles(None, 8)] == [8, 1]
    assert names(singles("auto", None)) == ["one process, diffusers", "one process, ours, attention auto"]


def test_numbers_of_processes() -> None:
    assert read_counts("4, 2") == [2, 4]
    for wrong in ("1", "two", "2,,4", "-2"):
        with pytest.raises(UserError, match="--nproc"):
            read_counts(wrong)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], str]:
    """The folder, the command, and what it said."""
    folder = tmp_path_factory.mktemp("bench")
    model = tiny_text.save("flux", folder / "flux")
    (folder / "map.py").write_text(BROKEN.format(adapter=str(ROOT / "adapters/flux.py")))
    words = ["bench", "parallel", "--model", str(model), *tiny_text.SIZES["flux"], "--guidance", "3", "--steps", "3"]
    words += ["--hook-map", str(folder / "map.py"), "--nproc", "2", "--modes", "gather,cfg,diffusers ulysses"]
    words += ["--output", str(folder / "results")]
    return folder / "results", words, chitu(words)


def chitu(words: list[str]) -> str:
    command = [sys.executable, "-m", "chitu_diffusion.cli.main", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert ended.returncode == 0, ended.stderr
    return ended.stderr


@pytest.mark.multiprocess
@pytest.mark.slow
def test_modes_are_checked_then_timed(done: tuple[Path, list[str], str]) -> None:
    cases = {record["case"]["name"]: record for record in summary([done[0]])["cases"]}
    ranks = {name: record["case"]["ranks"] for name, record in cases.items()}
    assert {name for name, count in ranks.items() if count == 2} == {"gather 2", "cfg 2", "diffusers ulysses 2"}
    assert cases["gather 2"]["timing"] is None, "it has the picture of half of the keys"
    assert "not that of one process: latents differ by" in cases["gather 2"]["error"]
    alone = cases["one process, diffusers"]
    for name in ("cfg 2", "diffusers ulysses 2", "one process, diffusers"):
        record = cases[name]
        assert record["error"] is None and record["off"] < 1e-4, record["error"]
        timing = record["timing"]
        assert timing["ms_step"]["samples"] == 3 and timing["against"]["name"].startswith("one process")
        assert timing["speedup"]["step"]["median"] > 0 and {"machine", "versions", "commit", "command"} <= set(record)
        stages = stages_of(record)
        assert sum(stages.values()) == pytest.approx(
            sum(timing["seconds"][stage]["median"] for stage in ("encode", "denoise", "decode"))
        )
    assert alone["timing"]["exchange"] == 0 and cases["cfg 2"]["timing"]["exchange"] > 0
    (cfg,) = [feature for feature in cases["cfg 2"]["features"] if feature["name"] == "cfg parallel"]
    assert cfg["calls left to other ranks"] == 2
    assert cases["cfg 2"]["command"].startswith("chitu bench parallel --model")


@pytest.mark.multiprocess
@pytest.mark.slow
def test_what_is_stored_is_not_measured_again(done: tuple[Path, list[str], str]) -> None:
    folder, words, told = done
    assert "timed cfg 2" in told
    before = {path.name: path.read_text() for path in (folder / "cases").iterdir()}
    again = chitu([*words, "--modes", "cfg"])
    assert "timed" not in again and "checked" not in again
    assert {path.name: path.read_text() for path in (folder / "cases").iterdir()} == before


@pytest.mark.multiprocess
@pytest.mark.slow
def test_collect_keeps_benches_apart(done: tuple[Path, list[str], str], tmp_path: Path) -> None:
    folder = done[0]
    assert {path.name for path in folder.glob("parallel_bench*")} == {
        "parallel_bench.json", "parallel_bench.md", "parallel_bench_scaling.png", "parallel_bench_stages.png",
    }  # fmt: skip
    page = (folder / "parallel_bench.md").read_text()
    assert page.count("| cfg 2 | 2 |") == 1 and "| gather 2 | 2 | the picture is not that of one process" in page
    found = CliRunner().invoke(app, ["bench", "collect", str(folder), str(folder), "--output", str(tmp_path / "all")])
    assert found.exit_code == 0, found.output
    assert (tmp_path / "all" / "parallel_bench.md").read_text() == page
    with pytest.raises(BenchError, match="holds results of the bench 'parallel'; give another for 'flexcache'"):
        Results(folder)


@pytest.mark.multiprocess
@pytest.mark.slow
def test_the_fastest_mode_has_a_row_in_the_readme(
    done: tuple[Path, list[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "ChituBench" / "scripts")
    import report_readme

    (row,) = report_readme.ranks(summary([done[0]]))
    assert len(row) == len(report_readme.COLUMNS)
    assert row[0] == "flux model: cfg 2" and "one process" in row[4] and row[8] == "`chitu bench parallel`"


def test_mistakes_are_told_before_anything_starts(tmp_path: Path) -> None:
    for words, told in (
        (["--nproc", "1"], "--nproc '1' is not a list of whole numbers from 2"),
        (["--repeats", "0"], "--repeats 0 is not possible"),
        (["--peers", "cache-dit"], "--peers 'cache-dit' is not possible here"),
    ):
        with pytest.raises(UserError) as error:
            CliRunner().invoke(
                app,
                ["bench", "parallel", *words, "--output", str(tmp_path / "x")],
                standalone_mode=False,
                catch_exceptions=False,
            )
        assert told in str(error.value) and not (tmp_path / "x").exists()
