"""The base class of every strategy's parameters: the limits that all share, and the checks of ranges."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import ClassVar

from chitu_hooks import PatchError
from chitu_hooks.errors import nearest


@dataclass(frozen=True, kw_only=True)
class Params:
    """Base class: a strategy's parameters, and the limits that all strategies share.

    Positions are those of the schedule of one generation, whatever number of steps it has: the two stages of an order-2
    step share one, and image to image counts the steps that it really runs.

    Raises:
        PatchError: a value is out of its range.
    """

    strategy: ClassVar[str] = ""

    warmup: int = 1
    """Positions at the start that are always computed, at least 1."""
    cooldown: int = 0
    """Positions at the end that are always computed, at least 0."""
    max_consecutive: int | None = None
    """Most positions to skip in a row, at least 1; None sets no limit."""

    def __post_init__(self) -> None:
        self._whole("warmup", least=1)
        self._whole("cooldown", least=0)
        self._whole("max_consecutive", least=1, optional=True)

    def _whole(self, name: str, least: int, most: int | None = None, optional: bool = False) -> None:
        value = getattr(self, name)
        if optional and value is None:
            return
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or value < least or (most is not None and value > most):
            range_ = f"from {least}" if most is None else f"from {least} to {most}"
            none = " or none" if optional else ""
            raise PatchError(f"{self.strategy}: {name} is a whole number {range_}{none}, not {value!r}")

    def _number(self, name: str, least: float = 0.0, most: float = math.inf) -> None:
        value = getattr(self, name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not least <= value <= most:  # NaN is in no range
            range_ = f"from {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
            raise PatchError(f"{self.strategy}: {name} is a number {range_}, not {value!r}")

    def _file(self, name: str) -> None:
        """A path of any kind is kept as text, so that reports stay plain data."""
        value = getattr(self, name)
        if value is None:
            return
        if not isinstance(value, (str, os.PathLike)):
            raise PatchError(f"{self.strategy}: {name} is the path of a file, not {value!r}")
        object.__setattr__(self, name, os.fspath(value))

    def _choice(self, name: str) -> None:
        if not isinstance(getattr(self, name), bool):
            raise PatchError(f"{self.strategy}: {name} is true or false, not {getattr(self, name)!r}")

    def _word(self, name: str, words: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in words:
            raise PatchError(
                f"{self.strategy}: {name} is {' or '.join(words)}, not {value!r}{nearest(str(value), words)}"
            )
