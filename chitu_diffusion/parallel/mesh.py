"""Which ranks work together: the groups for each degree, cut from a process group that somebody else has made."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from chitu_hooks import PatchError

from .params import Parallel


@dataclass(frozen=True)
class Axis:
    """The ranks that share everything but one coordinate of the mesh, this rank among them.

    Attributes:
        name: of the group, under which the collectives know it.
        ranks: global ranks, in the order of the coordinate.
        index: this rank's coordinate.
    """

    group: Any
    name: str
    ranks: tuple[int, ...]
    index: int

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class Mesh:
    """The axes of one picture's ranks. Ulysses is innermost: neighbours on the fastest links.

    Attributes:
        replica: all ranks of this picture.
        context: the ranks over which tokens are spread, `outer` (ring or gather) outermost.
    """

    replica: Axis
    cfg: Axis
    context: Axis
    outer: Axis
    ulysses: Axis


_MESHES: weakref.WeakKeyDictionary[Any, dict[Any, Mesh]] = weakref.WeakKeyDictionary()
"""Process group -> meshes cut from it: a group costs connections, so one is made once and lives as long as its parent."""


def make_mesh(parallel: Parallel) -> Mesh:
    """The groups of this rank. Only ranks that work together take part, so others need not call it.

    Raises:
        PatchError: no process group, or one whose size the degrees do not divide.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise PatchError(
            f"parallel: {parallel} needs {parallel.ranks} processes that are in touch, and no process group is initialised; "
            f"start with chitu run --nproc {parallel.ranks} or torchrun --nproc-per-node {parallel.ranks}, and call "
            "torch.distributed.init_process_group first"
        )
    parent: Any = parallel.group if parallel.group is not None else dist.group.WORLD
    if hasattr(parent, "get_group"):
        parent = parent.get_group()
    everyone = dist.get_process_group_ranks(parent)
    if len(everyone) % parallel.ranks:
        fit = ", ".join(str(n) for n in range(1, len(everyone) + 1) if len(everyone) % n == 0)
        raise PatchError(
            f"parallel: {parallel} takes {parallel.ranks} ranks, and the process group has {len(everyone)}; "
            f"products that fit: {fit}"
        )
    known = _MESHES.setdefault(parent, {})
    key = (parallel.cfg, parallel.outer, parallel.ulysses)
    if key not in known:
        known[key] = _cut(everyone, timeout_of(parent), *key)
    return known[key]


def timeout_of(group: Any) -> timedelta | None:
    """How long a rank of `group` waits for another; a group cut from it would have torch's default otherwise."""
    for device in ("cuda", "cpu"):
        try:
            return group._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):
            continue
    return None


def _cut(everyone: list[int], timeout: timedelta | None, cfg: int, outer: int, ulysses: int) -> Mesh:
    place = everyone.index(dist.get_rank())
    size = cfg * outer * ulysses
    first = place // size * size
    mine = everyone[first : first + size]
    at = place - first
    inner = outer * ulysses
    group_at, within = at // inner * inner, at % inner
    axis = _AxisMaker(mine, at, timeout)
    return Mesh(
        replica=axis(range(size)),
        cfg=axis(range(within, size, inner)),
        context=axis(range(group_at, group_at + inner)),
        outer=axis(range(group_at + within % ulysses, group_at + inner, ulysses)),
        ulysses=axis(range(at // ulysses * ulysses, at // ulysses * ulysses + ulysses)),
    )


@contextlib.contextmanager
def _unbound(world: Any) -> Iterator[None]:
    """Without the device that `init_process_group` was given: NCCL would split the world's communicator for a new group,
    which takes every rank of the world."""
    device = getattr(world, "bound_device_id", None)
    if device is None:
        yield
        return
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = device


class _AxisMaker:
    """Makes each set of ranks into a group once: with cfg=1 the replica is the context, say."""

    def __init__(self, mine: list[int], at: int, timeout: timedelta | None) -> None:
        self.mine = mine
        self.timeout = timeout
        self.at = at
        self.groups: dict[tuple[int, ...], Any] = {}

    def __call__(self, places: range) -> Axis:
        ranks = tuple(self.mine[place] for place in places)
        if len(ranks) == 1:
            return Axis(None, "", ranks, 0)
        if ranks not in self.groups:
            # Only its members take part in making it, so that ranks which do other things are not waited for.
            with _unbound(dist.distributed_c10d._get_default_group()):
                self.groups[ranks] = dist.new_group(list(ranks), timeout=self.timeout, use_local_synchronization=True)
        group = self.groups[ranks]
        return Axis(group, group.group_name, ranks, places.index(self.at))
