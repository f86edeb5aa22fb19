"""The mistakes that a user of the runtime can make, each told in one sentence."""

from __future__ import annotations

from chitu_hooks import ChituError


class RequestError(ChituError):
    """An option is wrong in itself, or the pipeline has no use for it."""


class LoadError(ChituError):
    """The model cannot be loaded: no such folder, half downloaded, unknown class, no such device."""


class OutputError(ChituError):
    """The output folder exists already or cannot be written."""
