"""How a decision is made while torch.compile traces an attention call: for real, as part of building the graph.

Functions marked `assume_constant_result` run when a call is traced, with that call's dtype, sizes and flags, and their
answer becomes part of the graph. So a graph carries no guards on tables and abilities, layers that look alike share one,
and a refusal reaches the user as the sentence that it is.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from chitu_hooks import RefusedError
from chitu_hooks.state import ACTIVE

from .kernel import AttentionCall

Decision = tuple[str | None, str | None]
"""Name of the kernel to run, None to leave the stock call; and why the call must not be made at all, or None."""


@torch.compiler.assume_constant_result
def kernel_while_tracing(name: str, *call_and_tokens: Any) -> str | None:
    """The kernel that the feature `name` chooses for the call that is being traced."""
    return _decide(name, *call_and_tokens)[0]


@torch.compiler.assume_constant_result
def refusal_while_tracing(name: str, *call_and_tokens: Any) -> str | None:
    """Why the feature `name` refuses the call that is being traced, or None."""
    return _decide(name, *call_and_tokens)[1]


def _decide(name: str, *call_and_tokens: Any) -> Decision:
    """`AttentionFeature.decide` of the feature `name` of the denoiser call that is underway."""
    engine = ACTIVE.call.engine  # type: ignore[union-attr]
    feature: Any = next(feature for feature in engine.features if feature.name == name)
    return feature.decide(AttentionCall(*call_and_tokens[:-1]), call_and_tokens[-1])


@torch.compiler.assume_constant_result
def refuse(layer: str, reason: str, tracing: bool) -> None:
    """Raise the refusal; in a function of its own, since traced code would wrap it in an error of the compiler's.

    Raises:
        RefusedError: always.
    """
    raise (_traced_refusal() if tracing else RefusedError)(f"{layer}: {reason}")


@functools.cache
def _traced_refusal() -> type[RefusedError]:
    """A `RefusedError` that the compiler lets through as it is, because it is also one of its own."""
    from torch._dynamo import exc

    class Refused(RefusedError, getattr(exc, "ShortenTraceback", exc.TorchDynamoException)):  # type: ignore[misc]
        def __init__(self, sentence: str) -> None:
            Exception.__init__(self, sentence)
            self.sentence = sentence
            self.first_useful_frame = None

        def __str__(self) -> str:
            return self.sentence  # the compiler adds its own notes to `args`

    Refused.__name__ = Refused.__qualname__ = RefusedError.__name__
    Refused.__module__ = RefusedError.__module__
    return Refused
