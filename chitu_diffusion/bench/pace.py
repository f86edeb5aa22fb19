"""How long a piece of work will take, from how long others took."""

from __future__ import annotations

from collections import deque

RECENT = 8
"""So many last pieces of work speak for the next: how fast one is drawn depends on how many others are drawn beside it."""


class Pace:
    """Seconds of one scheduler step of one picture.

    Attributes:
        alone: without a cache, with one picture a call and nothing beside it; the least that was seen, since what comes first
            is slower.
    """

    def __init__(self, alone: float = 0.0) -> None:
        self.alone = alone
        self._drawn: dict[tuple[int, bool], deque[float]] = {}

    def saw_alone(self, steps: int, seconds: float) -> None:
        """So many steps of single pictures of the baseline took so long."""
        self.alone = min(self.alone or float("inf"), seconds / steps)

    def saw_drawn(self, batch: int, steps: int, seconds: float, *, first: bool = False) -> None:
        """So many steps took so long by the clock, with `batch` pictures a call and whatever ran beside it.

        Args:
            first: it was the first that its process drew, and kernels were loaded meanwhile.
        """
        self._drawn.setdefault((batch, first), deque(maxlen=RECENT)).append(seconds / steps)

    def of(self, batch: int) -> float:
        """The slowest of the last with that batch size; before there are any, that of a single picture alone."""
        seen = self._drawn.get((batch, False)) or self._drawn.get((batch, True))
        return max(seen) if seen else self.alone
