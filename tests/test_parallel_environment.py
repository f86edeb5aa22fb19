"""Which rank a process is, from the environment of torchrun and of Slurm, and which of several failures is told."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chitu_diffusion.parallel.environment import World, find_world, first_host, ranks_here
from chitu_diffusion.parallel.launch import _first_cause, keep_lost_exits_quiet
from chitu_hooks import PatchError

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "29501"}
SLURM = {
    "SLURM_PROCID": "9", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "4711",
    "SLURM_STEP_NODELIST": "gpu[003-004,9]",
}  # fmt: skip


def test_torchrun() -> None:
    assert find_world(TORCHRUN) == World(3, 8, 1, "node1", 29501, "torchrun")


def test_torchrun_by_half() -> None:
    with pytest.raises(PatchError, match="LOCAL_RANK, MASTER_PORT is not"):
        find_world({name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")})


def test_slurm() -> None:
    world = find_world(SLURM)
    assert world is not None and (world.rank, world.size, world.local_rank) == (9, 16, 1)
    assert world.address == "gpu003" and world.launcher == "srun"
    other = find_world({**SLURM, "SLURM_JOB_ID": "4712"})
    assert other is not None and other.port != world.port, "two jobs on a node do not meet"
    assert find_world({**SLURM, "SLURM_STEP_ID": "1"}) != world, "nor two steps of one job"


def test_slurm_with_an_address_of_the_users() -> None:
    world = find_world({**SLURM, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"})
    assert world is not None and (world.address, world.port) == ("10.0.0.1", 1234)


@pytest.mark.parametrize(
    "environment",
    [{}, {**SLURM, "SLURM_NTASKS": "1"}, {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}],
    ids=["nothing", "one task", "an allocation without a step"],
)
def test_a_process_of_its_own(environment: dict[str, str]) -> None:
    assert find_world(environment) is None


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node7", "node7"),
        ("a1,a2", "a1"),
        ("gpu[003-005,9]", "gpu003"),
        ("rack[1-2]-n,x", "rack1-n"),
        ("n-1-[10,12]", "n-1-10"),
    ],
)
def test_first_host(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


@pytest.mark.parametrize(
    ("environment", "ranks"),
    [
        ({"LOCAL_WORLD_SIZE": "8"}, 8),
        ({"SLURM_TASKS_PER_NODE": "8(x2)"}, 8),
        ({"SLURM_TASKS_PER_NODE": "4"}, 4),
        ({"SLURM_TASKS_PER_NODE": "16", "SLURM_STEP_TASKS_PER_NODE": "2(x8)"}, 2),
        ({"SLURM_TASKS_PER_NODE": "8(x2),4"}, None),
        ({}, None),
    ],
)
def test_ranks_of_a_machine(environment: dict[str, str], ranks: int | None) -> None:
    assert ranks_here(environment) == ranks


def test_no_host() -> None:
    with pytest.raises(PatchError, match="MASTER_ADDR"):
        first_host("")


def failure(folder: Path, rank: int, exitcode: int, **told: Any) -> Any:
    file = folder / f"{rank}.json"
    if told:
        file.write_text(
            json.dumps({"chitu": {"message": "", "code": 1, "lost": False, "details": "", "time": 0.0, **told}})
        )
    name = signal.Signals(-exitcode).name if exitcode < 0 else ""
    return SimpleNamespace(
        local_rank=rank, pid=100 + rank, exitcode=exitcode, error_file=str(file), signal_name=lambda: name
    )


def test_a_lost_connection_is_never_the_cause_where_there_is_another(tmp_path: Path) -> None:
    lost = failure(tmp_path, 0, 1, message="rank 0 failed: connection closed by peer", lost=True, time=1.0)
    stopped = failure(tmp_path, 2, -signal.SIGTERM)
    killed = _first_cause([lost, stopped, failure(tmp_path, 1, -signal.SIGKILL)], tmp_path)
    assert killed.message == "rank 1 was killed by SIGKILL (process 101)" and killed.code == 1
    bug = _first_cause(
        [lost, stopped, failure(tmp_path, 3, 1, message="rank 3 failed: KeyError: 'x'", time=2.0)], tmp_path
    )
    assert bug.message == "rank 3 failed: KeyError: 'x'"
    mistake = _first_cause([lost, failure(tmp_path, 3, 2, message="no such model", code=2, time=2.0)], tmp_path)
    assert (mistake.message, mistake.code) == ("no such model", 2)
    assert _first_cause([lost, stopped], tmp_path).message == "rank 0 failed: connection closed by peer"


def test_what_a_rank_said_last_is_told_if_it_could_not_write_why(tmp_path: Path) -> None:
    log = tmp_path / "run" / "attempt_0" / "1" / "stderr.log"
    log.parent.mkdir(parents=True)
    log.write_text("\n".join(f"line {number}" for number in range(40)))
    told = _first_cause([failure(tmp_path, 1, 3)], tmp_path)
    assert told.message == "rank 1 ended with exit code 3" and told.details.splitlines()[-1] == "line 39"


def test_an_exit_that_python_loses_is_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM may come while a weakref's callback runs, and what its handler raises is dropped there."""
    told: list[type] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda lost: told.append(lost.exc_type))

    class Loses:
        def __init__(self, error: BaseException) -> None:
            self.error = error

        def __del__(self) -> None:
            raise self.error

    Loses(SystemExit(143))
    assert told == [SystemExit], "Python tells it"
    keep_lost_exits_quiet()
    Loses(SystemExit(143))
    Loses(KeyboardInterrupt())
    Loses(ValueError("a bug"))
    assert told == [SystemExit, ValueError]


SCRIPT = Path(__file__).resolve().parent.parent / "ChituBench" / "scripts" / "srun_chitu.sh"


def test_the_script_for_slurm_starts_a_process_a_gpu_on_every_node(tmp_path: Path) -> None:
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    srun.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "8"}
    command = ["bash", str(SCRIPT), "--prompt", "a red apple", "--ulysses", "8"]
    words = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    options = dict(itertools.pairwise(words))
    assert (options["--nodes"], options["--ntasks"], options["--ntasks-per-node"]) == ("2", "16", "8")
    assert "--kill-on-bad-exit=1" in words
    assert words[words.index("chitu") :] == ["chitu", "run", *command[2:]]
    del environment["SLURM_JOB_NUM_NODES"]
    alone = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert alone.returncode != 0 and "start me with sbatch" in alone.stderr
