"""Exchanges that torch.compile can see: the functional collectives, on rows of unequal number.

They are called as operators, without the wrapper of ``torch.distributed._functional_collectives``, whose tensor subclass
costs more than the launch where nothing is compiled. ``group`` is a group's name.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ops = torch.ops._c10d_functional


def split(total: int, parts: int) -> tuple[int, ...]:
    """`total` rows in `parts` shares, the first ones larger by one where it does not divide."""
    share, rest = divmod(total, parts)
    return tuple(share + (part < rest) for part in range(parts))


def start_all_to_all(rows: Tensor, received: Sequence[int], sent: Sequence[int], group: str) -> Tensor:
    """Row blocks of `sent` lengths begin to go to the ranks of the group; after `wait`, blocks of `received` lengths are
    here, one after another. What is started goes out in the order in which it was started, beside what is computed."""
    return ops.all_to_all_single(rows.contiguous(), list(received), list(sent), group)


def all_to_all(rows: Tensor, received: Sequence[int], sent: Sequence[int], group: str) -> Tensor:
    """`start_all_to_all`, and wait."""
    return wait(start_all_to_all(rows, received, sent, group))


def wait(coming: Tensor) -> Tensor:
    """What was started, ready to be read. On a GPU only its stream waits, not the host."""
    return ops.wait_tensor(coming)


def pass_on(rows: Tensor, sizes: Sequence[int], index: int, turn: int, group: str) -> Tensor:
    """Start to pass rows to the next rank round the ring, and to get those of the one before; `wait` ends it.

    Args:
        sizes: rows that each rank began with.
        turn: how often they have been passed on; `rows` are now those of rank ``index - turn``.
    """
    ranks = len(sizes)
    sent, received = [0] * ranks, [0] * ranks
    sent[(index + 1) % ranks] = sizes[(index - turn) % ranks]
    received[(index - 1) % ranks] = sizes[(index - turn - 1) % ranks]
    return ops.all_to_all_single(rows, received, sent, group)


def start_all_gather(rows: Tensor, sizes: Sequence[int], group: str) -> Tensor:
    """Begin to bring the rows of every rank, of which `sizes` are the numbers, to all; `finish_all_gather` ends it."""
    missing = max(sizes) - rows.shape[0]
    if missing:
        rows = torch.cat([rows, rows.new_zeros((missing, *rows.shape[1:]))])
    return ops.all_gather_into_tensor(rows.contiguous(), len(sizes), group)


def finish_all_gather(coming: Tensor, sizes: Sequence[int]) -> Tensor:
    """The rows of every rank, in the order of ranks."""
    found, largest = wait(coming), max(sizes)
    if all(size == largest for size in sizes):
        return found
    return torch.cat([found[rank * largest : rank * largest + size] for rank, size in enumerate(sizes)])


def all_gather(rows: Tensor, sizes: Sequence[int], group: str) -> Tensor:
    """The rows of every rank, in the order of ranks; `sizes` are their numbers."""
    return finish_all_gather(start_all_gather(rows, sizes, group), sizes)


def all_gather_dim(tensor: Tensor, dim: int, sizes: Sequence[int], group: str) -> Tensor:
    """`all_gather` along a dimension other than the first."""
    return all_gather(tensor.movedim(dim, 0), sizes, group).movedim(0, dim)
