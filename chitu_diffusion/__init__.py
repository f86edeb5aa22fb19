"""Chitu: make a loaded diffusers pipeline faster in place, and take it off again without a trace.

::

    from chitu_diffusion import patch

    with patch(pipe, cache="static", attention="sdpa_flash") as handle:
        image = pipe("a red apple on a blue background").images[0]
    print(handle.report())
"""

from chitu_hooks import ChituError, Feature, Handle, HookMap, Stack

from .api import patch
from .flexcache import Static

__all__ = ["ChituError", "Feature", "Handle", "HookMap", "Stack", "Static", "patch"]
__version__ = "0.1.0.dev0"
