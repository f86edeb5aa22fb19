"""Ranks that make one picture are asked for the same picture, and draw the same noise."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from chitu_hooks import Feature, Generation, GenerationError, Order

from .mesh import Mesh


class Agreement(Feature):
    """At the beginning of every generation the first rank's random state becomes that of all, and requests are compared.

    The state is that of torch's global generators, which stochastic schedulers draw from whatever they are given, and of
    every `torch.Generator` among the call's arguments.
    """

    name = "same request"
    order = Order.CLOCK

    def __init__(self, mesh: Mesh) -> None:
        self.axis = mesh.replica

    def told(self, mine: Any) -> list[Any]:
        """What every rank of this picture says, the first rank's first: small objects that can be pickled."""
        found: list[Any] = [None] * self.axis.size
        dist.all_gather_object(found, mine, group=self.axis.group)
        return found

    def begin(self, generation: Generation) -> None:
        """Raises:
        GenerationError: the ranks were called with different arguments, on every rank and naming them.
        """
        given: list[dict[str, str]] = self.told(described(generation))
        names = sorted(
            {name for one in given for name in one if any(one.get(name) != other.get(name) for other in given)}
        )
        if names:
            raise GenerationError(
                f"the ranks {', '.join(map(str, self.axis.ranks))} make one picture and were called with different "
                f"{', '.join(names)}; call {type(generation.pipe).__name__} with the same arguments on each"
            )
        generators = list(generators_of((generation.args, generation.kwargs)))
        states: list[Any] = [None]
        if self.axis.index == 0:
            states = [(global_states(), [generator.get_state() for generator in generators])]
        dist.broadcast_object_list(states, src=self.axis.ranks[0], group=self.axis.group)
        if self.axis.index != 0:
            set_global_states(states[0][0])
            for generator, state in zip(generators, states[0][1]):
                generator.set_state(state)

    def report(self) -> dict[str, Any]:
        return {"ranks": list(self.axis.ranks)}


def global_states() -> list[torch.Tensor]:
    """States of the generators that are drawn from where none is given."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_available() else [])]


def set_global_states(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])


def generators_of(value: Any) -> Iterator[torch.Generator]:
    """Every generator in nested arguments, in a fixed order."""
    if isinstance(value, torch.Generator):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from generators_of(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from generators_of(item)


def described(generation: Generation) -> dict[str, str]:
    """Argument -> what must be the same on every rank: values, tensors and pictures by their content, other things by class."""
    named = {f"argument {place}": value for place, value in enumerate(generation.args)} | generation.kwargs
    steps = {"scheduler": type(generation.scheduler).__name__}
    return {name: _digest(value) for name, value in named.items()} | steps


def _digest(value: Any) -> str:
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, torch.Generator):
        return f"generator on {value.device.type}"
    if isinstance(value, torch.Tensor):
        content = value.detach().contiguous().cpu().flatten().view(torch.uint8) if value.numel() else value
        return f"{tuple(value.shape)} {value.dtype} {hashlib.blake2b(content.numpy().tobytes()).hexdigest()}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_digest(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_digest(item)}' for key, item in value.items())}}}"
    if hasattr(value, "tobytes"):  # a Pillow picture, a numpy array
        return hashlib.blake2b(value.tobytes()).hexdigest()
    return type(value).__qualname__
