"""What can be wrong with a model that is taken in, told in one sentence each."""

from __future__ import annotations

from chitu_hooks import ChituError


class IntakeError(ChituError):
    """The model cannot be read, its reference cannot be recorded, or a file that would be written is there already."""


def last_line(error: BaseException) -> str:
    """The last line of an error's text, after its class."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__
