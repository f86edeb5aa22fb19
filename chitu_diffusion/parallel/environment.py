"""Which rank this process is, by what torchrun, srun or our own launcher has put into the environment."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta

from chitu_hooks import PatchError

FIRST_PORT = 20000
PORTS = 20000
"""Under Slurm the port follows from the job's number, so that two jobs on one node differ."""


@dataclass(frozen=True)
class World:
    """This process among those that were started together.

    Attributes:
        local_rank: its number on this machine, which is that of its GPU.
        address, port: where the first rank listens.
    """

    rank: int
    size: int
    local_rank: int
    address: str
    port: int
    launcher: str


def find_world(environment: Mapping[str, str] | None = None) -> World | None:
    """The world that a launcher has made this process a part of; None for a process of its own.

    Raises:
        PatchError: the environment of a launcher is there by half.
    """
    found = os.environ if environment is None else environment
    if "RANK" in found and "WORLD_SIZE" in found:
        return _torchrun(found)
    if int(found.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in found and "SLURM_STEP_ID" in found:
        return _slurm(found)
    return None


def _torchrun(found: Mapping[str, str]) -> World | None:
    missing = [name for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in found]
    if missing:
        raise PatchError(
            f"RANK and WORLD_SIZE are set and {', '.join(missing)} is not; start with torchrun or srun, or unset them"
        )
    return World(
        int(found["RANK"]),
        int(found["WORLD_SIZE"]),
        int(found["LOCAL_RANK"]),
        found["MASTER_ADDR"],
        int(found["MASTER_PORT"]),
        "torchrun",
    )


def _slurm(found: Mapping[str, str]) -> World:
    nodes = found.get("SLURM_STEP_NODELIST") or found.get("SLURM_JOB_NODELIST") or ""
    address = found.get("MASTER_ADDR") or first_host(nodes)
    number = int(found.get("SLURM_JOB_ID", "0")) * 31 + int(found.get("SLURM_STEP_ID", "0"))
    return World(
        int(found["SLURM_PROCID"]),
        int(found["SLURM_NTASKS"]),
        int(found.get("SLURM_LOCALID", "0")),
        address,
        int(found.get("MASTER_PORT") or FIRST_PORT + number % PORTS),
        "srun",
    )


def ranks_here(environment: Mapping[str, str] | None = None) -> int | None:
    """Ranks on each machine, as the launcher has it; None if it does not say, or if machines differ."""
    found = os.environ if environment is None else environment
    if "LOCAL_WORLD_SIZE" in found:  # torchrun
        return int(found["LOCAL_WORLD_SIZE"])
    tasks = found.get("SLURM_STEP_TASKS_PER_NODE", found.get("SLURM_TASKS_PER_NODE", ""))
    match = re.fullmatch(r"(\d+)(\(x\d+\))?", tasks)  # 8(x2): eight on each of two machines
    return int(match.group(1)) if match is not None else None


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: ``gpu[003-005,9],login1`` -> ``gpu003``.

    Raises:
        PatchError: it is not one.
    """
    match = re.match(r"([^\[,\s]+)(?:\[(\d+)[^\]]*\]([^\[,\s]*))?", nodes)
    if match is None:
        raise PatchError(f"the node list {nodes!r} of Slurm names no host; set MASTER_ADDR to the first node")
    head, number, tail = match.groups()
    return f"{head}{number or ''}{tail or ''}"


@contextlib.contextmanager
def joined(world: World, device: str, timeout: float = 600) -> Iterator[None]:
    """The process group of `world`, for a while: NCCL where the device is a GPU, gloo elsewhere.

    Args:
        timeout: seconds after which a rank that waits for another gives up.
    """
    import torch
    import torch.distributed as dist

    cuda = device.startswith("cuda")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"tcp://{world.address}:{world.port}" if world.launcher == "srun" else "env://",
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=timeout),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def in_turn(local_rank: int) -> Iterator[None]:
    """The ranks of a machine one after another: each reads the weights, moves them to its GPU and lets the host's copy go.

    So the host holds them once, however many ranks there are; after the first they come from the file system's cache.
    """
    import torch.distributed as dist

    places: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(places, local_rank)
    for _ in range(local_rank):
        dist.barrier()
    yield
    for _ in range(local_rank, max(places) + 1):
        dist.barrier()
