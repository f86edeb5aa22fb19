"""Into how many head groups attention is divided, so that one group is exchanged while another attends.

Divided is only what is large. On two H200s with NVLink a collective takes about 80 µs however little it carries up to
8 MiB, and about 220 GB/s beyond: a part of less than 8 MiB costs as much as the whole, and the host launches it besides.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

PART = 8 << 20
"""Bytes that each part of the smallest exchange is to carry."""

MOST = 4
"""Head groups at most: what stays uncovered, the first way in and the last way out, is a quarter then."""


def bytes_sent(tokens: int, row: int, ulysses: int, gather: int) -> int:
    """What one rank sends in the smallest exchange of one attention, the same number on every rank.

    Args:
        tokens: of all ranks, times the batch.
        row: bytes of one token's queries.
        ulysses, gather: degrees, of which one is 1.
    """
    if ulysses > 1:  # on the way back; the way in carries three times as much
        return tokens // ulysses * row * (ulysses - 1) // ulysses
    return 2 * (tokens // gather) * row * (gather - 1)


def groups_for(sent: int, heads: Iterable[int]) -> int:
    """Head groups for exchanges of `sent` bytes: as many as divide every layer's heads and leave each part large."""
    common = math.gcd(*heads)
    return max((n for n in range(1, MOST + 1) if n == 1 or (common % n == 0 and sent >= n * PART)), default=1)
