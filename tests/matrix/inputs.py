"""The words in which an entry says what one call of its transformer takes.

An entry is a dict from argument name to one of these words, or to a value that is passed as it is. The first argument is
the sample: what the scheduler steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tiny_parts import noise


@dataclass(frozen=True)
class Word:
    """One argument; ``make(prompt, timestep)`` is its value. `prompt` numbers the branch."""

    make: Callable[[int, torch.Tensor], Any]
    steps: bool = False
    """Whether the value changes from step to step."""


def sample(*shape: int, listed: bool = False) -> Sample:
    """The noisy latent, shaped `shape`; `listed` for a model that takes a list of samples without a batch dim."""
    return Sample(shape, listed)


@dataclass(frozen=True)
class Sample:
    shape: tuple[int, ...]
    listed: bool = False


def text(*shape: int) -> Word:
    """Random numbers that differ between the branches."""
    return Word(lambda prompt, t: torch.randn(shape, generator=noise(100 + prompt)))


def fixed(*shape: int) -> Word:
    """Random numbers that are the same in every call."""
    return Word(lambda prompt, t: torch.randn(shape, generator=noise(len(shape))))


def full(value: float, *shape: int, dtype: torch.dtype = torch.float32) -> Word:
    return Word(lambda prompt, t: torch.full(shape, value, dtype=dtype))


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Word:
    return full(1, *shape, dtype=dtype)


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Word:
    return full(0, *shape, dtype=dtype)


def ints(below: int, *shape: int) -> Word:
    """Whole numbers from 0 to below `below` that differ between the branches."""
    return Word(lambda prompt, t: torch.randint(0, below, shape, generator=noise(100 + prompt)))


def time(*shape: int, scale: float = 1.0) -> Word:
    """The step's timestep, 1000 down to 0, times `scale`."""
    return Word(lambda prompt, t: (t * scale).expand(shape or (1,)), steps=True)


def several(*words: Word) -> Word:
    """A list of values."""
    return Word(lambda prompt, t: [word.make(prompt, t) for word in words])


def given(make: Callable[[], Any]) -> Word:
    """Whatever `make` returns, for layouts that are more than a shape."""
    return Word(lambda prompt, t: make())


def grid_ids(text_tokens: int, height: int, width: int, axes: int = 3, batched: bool = False) -> torch.Tensor:
    """Rotary positions, (text + image tokens, axes): zeros for text, row and column in the last two axes for the image."""
    ids = torch.zeros(text_tokens + height * width, axes)
    ids[text_tokens:, -2] = torch.arange(height).repeat_interleave(width)
    ids[text_tokens:, -1] = torch.arange(width).repeat(height)
    return ids[None] if batched else ids
