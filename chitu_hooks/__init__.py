"""The hook engine: hooks a loaded diffusers pipeline at four seams and takes itself off again without a trace.

It knows no kernel, cache or rank; those are features (`Feature`) and live in `chitu_diffusion`.
"""

from .attention import AttentionContext
from .call import BlockInputs, Call, StepCall
from .errors import ChituError, ChituWarning, GenerationError, HookMapError, PatchError, RefusedError
from .feature import Exactness, Feature, Order, Refusal
from .hook_map import HookMap, Stack, load_hook_map
from .patch import Handle, patch
from .report import Report
from .sites import Sites
from .state import Branch, Generation, Step, Streams

__all__ = [
    "AttentionContext",
    "BlockInputs",
    "Branch",
    "Call",
    "ChituError",
    "ChituWarning",
    "Exactness",
    "Feature",
    "Generation",
    "GenerationError",
    "Handle",
    "HookMap",
    "HookMapError",
    "Order",
    "PatchError",
    "Refusal",
    "RefusedError",
    "Report",
    "Sites",
    "Stack",
    "Step",
    "StepCall",
    "Streams",
    "load_hook_map",
    "patch",
]
