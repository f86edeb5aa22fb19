"""Into how many head groups attention is divided, so that one group is exchanged while another attends.

Divided is only what is large. On two H200s with NVLink a collective takes about 80 µs however little it carries up to
8 MiB, and about 220 GB/s beyond, so a part of less than 8 MiB costs as much as a larger one. And every group is launched by
the host: at 27 MiB an attention (FLUX.1 at 1024²) the host needs as long for a block as the GPU, 1.3 ms, and more launches
cost more than they hide; at 99 MiB (2048²) a block takes 6 ms and hides them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

PART = 8 << 20
"""Bytes that each part of every exchange is to carry."""

LARGE = 64 << 20
"""Bytes that one attention is to exchange in all."""

MOST = 4
"""Head groups at most: what stays uncovered, the first way in and the last way out, is a quarter then."""


class Sent(NamedTuple):
    """Bytes that one rank sends for one attention; the same numbers on every rank."""

    smallest: int
    """In the smallest exchange."""
    total: int


def bytes_sent(tokens: int, row: int, key_row: int, ulysses: int, gather: int) -> Sent:
    """What a rank sends for one attention.

    Args:
        tokens: of all ranks, times the batch.
        row: bytes of one token's queries.
        key_row: bytes of one token's keys, fewer where several heads share one.
        ulysses, gather: degrees, of which one is 1.
    """
    if ulysses > 1:  # the way in carries queries, keys and values, the way back the result
        back = tokens // ulysses * row * (ulysses - 1) // ulysses
        return Sent(back, 2 * back + 2 * back * key_row // row)
    both = 2 * (tokens // gather) * key_row * (gather - 1)
    return Sent(both, both)


def groups_for(sent: Sent, heads: Iterable[int]) -> int:
    """Head groups for exchanges of that size: as many as divide every layer's heads and leave each part large."""
    if sent.total < LARGE:
        return 1
    common = math.gcd(*heads)
    return max(n for n in range(1, MOST + 1) if n == 1 or (common % n == 0 and sent.smallest >= n * PART))
