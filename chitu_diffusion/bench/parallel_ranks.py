"""One rank of ``chitu bench parallel``: in its process group, and quiet unless it is the first."""

from __future__ import annotations

from chitu_diffusion.parallel.environment import World, joined
from chitu_diffusion.runtime.loading import pick_device

from .meter import Meter
from .parallel import Bench, Plan

PATIENCE = 300
"""Seconds that a rank waits for another: one of them may draw a picture alone meanwhile."""


def measure(plan: Plan, world: World) -> None:
    """Do this rank's part of `plan`."""
    from rich.console import Console

    device = pick_device(plan.task.device, plan.task.require_gpu, world.local_rank)
    with joined(world, device, PATIENCE):
        if world.rank:
            Bench(plan, world.local_rank, None).run()
            return
        with Meter(Console(stderr=True), 1) as meter:
            Bench(plan, world.local_rank, meter).run()
