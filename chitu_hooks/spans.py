"""Spans: which blocks of each stack a skipped trunk leaves out, when its front and back blocks are still computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .sites import BlockSite, StackSite


@dataclass(frozen=True, eq=False)
class Spans:
    """The middle of a trunk."""

    ranges: dict[int, range] = field(default_factory=dict)
    """Stack number -> the indices of its blocks that can be skipped; a stack that is not here is always run."""
    front_end: BlockSite | None = None
    """The last of the front blocks."""

    def covers(self, stack: int, index: int) -> bool:
        span = self.ranges.get(stack)
        return span is not None and span.start <= index < span.stop


def find_spans(stacks: Sequence[StackSite], front: int = 0, back: int | float = 0) -> Spans:
    """The middle of the trunk that `stacks` are, in the order in which they run.

    Args:
        stacks: with the refiners, which are in the middle only if nothing is at the ends.
        front, back: number of blocks that are always computed, or, of those at the back, their part of the trunk.
    """
    if not front and not back:
        return Spans({stack.number: range(len(stack.blocks)) for stack in stacks})
    trunk = [stack for stack in stacks if not stack.refiner and stack.returns is not None]
    number = sum(len(stack.blocks) for stack in trunk)
    if 0 < back < 1:
        back = number - min(max(round(round((1 - back) * number, 6)), 1), number - 1)
    stop = number - int(back)
    ranges, front_end, before = {}, None, 0
    for stack in trunk:
        span = range(max(front - before, 0), min(stop - before, len(stack.blocks)))
        if span.start < span.stop:
            ranges[stack.number] = span
        if before < front <= before + len(stack.blocks):
            front_end = stack.blocks[front - before - 1]
        before += len(stack.blocks)
    return Spans(ranges, front_end)
