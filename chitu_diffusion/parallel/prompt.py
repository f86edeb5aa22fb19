"""The prompt is encoded by the first rank of a picture; the others get the embeddings."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from chitu_hooks import Feature, Generation, GenerationError, Order
from chitu_hooks.clock import instance_wrapper

from .agree import generators_of, global_states, set_global_states
from .mesh import Mesh

METHOD = "encode_prompt"
"""What pipelines of diffusers call, as a method of their own, to turn texts into embeddings."""


class Room(NamedTuple):
    """In a message, in place of a tensor that follows."""

    shape: torch.Size
    dtype: torch.dtype


class PromptOnce(Feature):
    """``pipe.encode_prompt`` on the first rank of `mesh.replica` alone.

    The ranks were asked for the same (`Agreement`), so they call it equally often. If it draws random numbers, from torch's
    generators or from those of the call, the others go on from the state that the first rank is left in, as one process would.
    """

    name = "prompt once"
    order = Order.CLOCK

    def __init__(self, mesh: Mesh) -> None:
        self.axis = mesh.replica
        self.encoded = self.received = 0

    def begin(self, generation: Generation) -> None:
        self.encoded = self.received = 0
        pipe = generation.pipe
        if not callable(getattr(pipe, METHOD, None)):
            generation.note(f"{self.name}: {type(pipe).__name__} has no {METHOD}, so every rank encodes the prompt")
            return

        generators = list(generators_of((generation.args, generation.kwargs)))
        inside = False

        def encode(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
            nonlocal inside
            if inside or not generation.running_here:  # one that calls itself is one call to the others
                return wrapped(*args, **kwargs)
            if self.axis.index != 0:
                return self._receive(pipe, generators)
            inside = True
            try:
                return self._encode(lambda: wrapped(*args, **kwargs), generators)
            finally:
                inside = False

        hooks = generation.memory(self).hooks = contextlib.ExitStack()
        hooks.enter_context(instance_wrapper(pipe, METHOD, encode))

    def _encode(self, wrapped: Callable[[], Any], generators: list[torch.Generator]) -> Any:
        before, tensors = _states(generators), []

        def room(value: Any) -> Any:
            if not isinstance(value, Tensor) or not self._goes_alone(value):
                return value
            tensors.append(value)
            return Room(value.shape, value.dtype)

        try:
            found = wrapped()
            form = _mapped(found, room)
        except BaseException as error:
            self._broadcast_objects([f"{type(error).__name__}: {error}", None, None])
            raise
        self.encoded += 1
        after = _states(generators)
        drew = any(not torch.equal(a, b) for a, b in zip(before, after))
        self._broadcast_objects([None, form, after if drew else None])
        for tensor in tensors:
            self._broadcast(tensor.contiguous())
        return found

    def _receive(self, pipe: Any, generators: list[torch.Generator]) -> Any:
        """Raises:
        GenerationError: the first rank could not encode.
        """
        failure, form, states = self._broadcast_objects([None, None, None])
        if failure is not None:
            raise GenerationError(f"{self.name}: rank {self.axis.ranks[0]} could not encode the prompt: {failure}")
        device = pipe._execution_device
        self.received += 1
        if states is not None:
            own = len(states) - len(generators)
            set_global_states(states[:own])
            for generator, state in zip(generators, states[own:]):
                generator.set_state(state)

        def filled(value: Any) -> Any:
            if not isinstance(value, Room):
                return value
            return self._broadcast(torch.empty(value.shape, dtype=value.dtype, device=device))

        return _mapped(form, filled)

    def _goes_alone(self, tensor: Tensor) -> bool:
        """Not within the pickled message: NCCL sends what is on a GPU, gloo also what is on the host."""
        return tensor.numel() > 0 and (tensor.device.type == "cuda" or dist.get_backend(self.axis.group) == "gloo")

    def _broadcast_objects(self, objects: list[Any]) -> list[Any]:
        dist.broadcast_object_list(objects, src=self.axis.ranks[0], group=self.axis.group)
        return objects

    def _broadcast(self, tensor: Tensor) -> Tensor:
        dist.broadcast(tensor, src=self.axis.ranks[0], group=self.axis.group)
        return tensor

    def end(self, generation: Generation) -> None:
        hooks = getattr(generation.memory(self), "hooks", None)
        if hooks is not None:
            hooks.close()

    def report(self) -> dict[str, Any]:
        return {"encoded here": self.encoded, "received": self.received}


def _states(generators: list[torch.Generator]) -> list[Tensor]:
    return [*global_states(), *(generator.get_state() for generator in generators)]


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """`value` with `function` applied to all that its tuples, lists and dicts hold; what these are, named ones too, is kept."""
    if isinstance(value, Room):
        return function(value)
    if isinstance(value, (list, tuple)):
        items = [_mapped(item, function) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        named = {key: _mapped(item, function) for key, item in value.items()}
        return named if type(value) is dict else type(value)(**named)
    return function(value)
