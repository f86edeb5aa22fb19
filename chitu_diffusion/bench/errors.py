"""What can be wrong with a bench, each told in one sentence."""

from __future__ import annotations

from chitu_hooks import ChituError


class BenchError(ChituError):
    """A case file, a results folder or an option of the bench is wrong, or a result cannot be written."""


def one_line(error: BaseException) -> str:
    """What went wrong, on one line of a table."""
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, ChituError) and text else f"{type(error).__name__}: {text}"
