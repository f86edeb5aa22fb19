"""What can be wrong with a model that is taken in, told in one sentence each."""

from __future__ import annotations

from chitu_hooks import ChituError


class IntakeError(ChituError):
    """The model cannot be read, its reference cannot be recorded, or a file that would be written is there already."""


LONGEST = 240
"""Characters of a foreign error's text that are passed on."""


def told(error: BaseException) -> str:
    """An error's class and the first line of its text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else ""
    if len(first) > LONGEST:
        first = first[:LONGEST].rstrip() + "…"
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
