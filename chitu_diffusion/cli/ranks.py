"""``chitu run`` on several ranks: starting them, or taking the place that torchrun or srun has given this process."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .group import UserError, say

if TYPE_CHECKING:
    from chitu_diffusion.runtime import DiffusionTask


def starts_ranks(task: DiffusionTask) -> bool:
    """Start the ranks that `task` needs, and wait for them; False if this process is to draw itself.

    Raises:
        UserError: `nproc` and the degrees do not fit together, or what launched this process.
    """
    from chitu_diffusion.parallel.environment import find_world

    world = find_world()
    started = world.size if world is not None else task.nproc or task.ranks
    if started % task.ranks:
        raise UserError(
            f"{started} processes cannot be divided into groups of {task.ranks}, the product of the degrees; "
            f"--nproc {task.ranks} or a multiple of it fits"
        )
    if world is not None or started == 1:
        return False
    check_devices(task.device, started)
    from chitu_diffusion.parallel.launch import launch

    failure = launch(["-m", "chitu_diffusion.cli.main", *sys.argv[1:]], started)
    if failure is None:
        return True
    if failure.details:
        print(failure.details, file=sys.stderr)
    say(failure.message)
    sys.exit(failure.code)


def check_devices(device: str, started: int) -> None:
    """Whether there is a GPU for each of `started` processes, where they are to use GPUs.

    Raises:
        UserError: there are too few, or one was named.
    """
    import torch

    count = torch.cuda.device_count()
    if device.startswith("cuda:"):
        raise UserError(f"--device {device} is one GPU, and {started} processes are to be started; use --device cuda")
    if device in ("auto", "cuda") and 0 < count < started:
        raise UserError(f"--nproc {started} takes one GPU a process, and torch sees {count}; --nproc {count} fits")


@contextlib.contextmanager
def in_world(task: DiffusionTask) -> Iterator[bool]:
    """The process group, if this process is one of several; whether it is the one that prints and writes.

    Raises:
        UserError: it is one of several, and the task says nothing about several.
    """
    from chitu_diffusion.parallel.environment import find_world, joined

    world = find_world()
    if world is None or (world.size == 1 and task.ranks == 1):
        yield True
        return
    if task.ranks == 1:
        raise UserError(
            f"{world.launcher} has started {world.size} processes and none of --nproc, --cfg-parallel, --ulysses, --ring and "
            "--gather is given; each would draw the same picture"
        )
    from chitu_diffusion.runtime.loading import pick_device

    with joined(world, pick_device(task.device, task.require_gpu, world.local_rank)):
        yield world.rank == 0
