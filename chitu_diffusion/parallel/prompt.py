"""The prompt is encoded by the first rank of a picture; the others get the embeddings."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from chitu_hooks import Feature, Generation, GenerationError, Order
from chitu_hooks.call import map_tensors
from chitu_hooks.clock import instance_wrapper

from .agree import global_states, set_global_states
from .mesh import Mesh

METHOD = "encode_prompt"
"""What pipelines of diffusers call, as a method of their own, to turn texts into embeddings."""


class Room(NamedTuple):
    """In a message, in place of a tensor that follows."""

    shape: torch.Size
    dtype: torch.dtype


class PromptOnce(Feature):
    """``pipe.encode_prompt`` on the first rank of `mesh.replica` alone.

    The ranks were asked for the same (`Agreement`), so they call it equally often. If it draws random numbers, the others
    go on from the state that the first rank is left in, as one process would.
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

        def encode(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
            if not generation.running_here:
                return wrapped(*args, **kwargs)
            if self.axis.index == 0:
                return self._encode(wrapped, args, kwargs)
            return self._receive(pipe)

        hooks = generation.memory(self).hooks = contextlib.ExitStack()
        hooks.enter_context(instance_wrapper(pipe, METHOD, encode))

    def _encode(self, wrapped: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        before = global_states()
        try:
            found = wrapped(*args, **kwargs)
        except BaseException as error:
            self._broadcast_objects([f"{type(error).__name__}: {error}", None, None])
            raise
        self.encoded += 1
        after = global_states()
        drew = any(not torch.equal(a, b) for a, b in zip(before, after))
        tensors: list[Tensor] = []

        def room(tensor: Tensor) -> Any:
            if not self._goes_alone(tensor):
                return tensor
            tensors.append(tensor)
            return Room(tensor.shape, tensor.dtype)

        self._broadcast_objects([None, map_tensors(found, room), after if drew else None])
        for tensor in tensors:
            self._broadcast(tensor.contiguous())
        return found

    def _receive(self, pipe: Any) -> Any:
        """Raises:
        GenerationError: the first rank could not encode.
        """
        failure, form, states = self._broadcast_objects([None, None, None])
        if failure is not None:
            raise GenerationError(f"{self.name}: rank {self.axis.ranks[0]} could not encode the prompt: {failure}")
        device = pipe._execution_device
        self.received += 1
        if states is not None:
            set_global_states(states)
        return self._filled(form, device)

    def _filled(self, form: Any, device: torch.device) -> Any:
        if isinstance(form, Room):
            return self._broadcast(torch.empty(form.shape, dtype=form.dtype, device=device))
        if isinstance(form, (list, tuple)):
            return type(form)(self._filled(item, device) for item in form)
        if isinstance(form, dict):
            return {name: self._filled(item, device) for name, item in form.items()}
        return form

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
