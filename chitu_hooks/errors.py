"""The errors that a user can meet, each one sentence: what, by name, the numbers, and the way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ChituError(Exception):
    """Base of every error that Chitu raises on purpose."""


class HookMapError(ChituError):
    """A hook map does not fit the pipeline: wrong path, wrong argument name, two maps for one pipeline, none at all."""


class PatchError(ChituError):
    """The pipeline cannot be patched as it is now: already patched, not a pipeline, a wrong option."""


class RefusedError(ChituError):
    """A feature cannot do what it was asked to do exactly, and says what would fit."""


class GenerationError(ChituError):
    """A running generation broke a rule that nothing could check earlier, such as two threads in one pipeline."""


class ChituWarning(UserWarning):
    """Something was asked for and did not happen, or happened in a way that the user should know of."""


def nearest(word: str, known: Iterable[str], count: int = 3) -> str:
    """``"; nearest: a, b"`` for the known words that resemble `word`, or the known words themselves if none does."""
    known = sorted(set(known))
    close = difflib.get_close_matches(word, known, n=count, cutoff=0.5)
    if close:
        return f"; nearest: {', '.join(close)}"
    if not known:
        return ""
    shown = ", ".join(known[:12]) + (", …" if len(known) > 12 else "")
    return f"; known: {shown}"
