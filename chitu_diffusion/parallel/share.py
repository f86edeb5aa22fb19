"""One rank reads a model, the others get it: the structure as a message, the weights from device to device.

So the host holds the weights once, however many ranks there are, and they are read once. The structure is the pickled
object with room in place of every weight, so that the others build nothing by themselves: classes, tied weights, buffers
that no checkpoint has, tokenizers and schedulers are those of the first rank.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .environment import in_turn

PATIENCE = timedelta(days=1)
"""How long the others wait for the first rank to read: a large model from a slow disk. One that dies ends them all."""


def load_once(load: Callable[[], Any], device: str, local_rank: int) -> Any:
    """What `load` returns, on every rank of the world, its modules on `device`; only the first rank calls it.

    Something that cannot be pickled, such as quantised weights, is loaded by every rank, the ranks of a machine in turn.

    Args:
        load: makes a pipeline on the host.
        device: of this rank.
        local_rank: number of this rank on its machine.

    Raises:
        BaseException: whatever `load` raised on the first rank, on every rank.
    """
    with waiting_group() as group:
        first = dist.get_rank() == 0
        weights: list[Tensor] = []
        told: list[Any] = [None]
        pipe = None
        if first:
            try:
                pipe = load()
                told = [emptied(pipe, weights)]
            except BaseException as error:
                _tell(error, group)
                raise
        dist.broadcast_object_list(told, src=0, group=group)
    (structure,) = told
    if isinstance(structure, BaseException):
        raise structure
    if structure is None:
        if first:
            pipe.to(device)  # type: ignore[union-attr]
        with in_turn(local_rank):
            return pipe if first else load().to(device)
    if not first:
        pipe = filled(structure, weights, device)
    for weight in weights:
        _send(weight, device, first)
    return pipe.to(device)  # type: ignore[union-attr]


@contextlib.contextmanager
def waiting_group() -> Iterator[Any]:
    """All ranks, for messages between hosts, with the patience that reading a model takes."""
    group = dist.new_group(backend="gloo", timeout=PATIENCE)
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def _tell(error: BaseException, group: Any) -> None:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"the first rank could not load the model: {type(error).__name__}: {error}")
    dist.broadcast_object_list([error], src=0, group=group)


def _send(weight: Tensor, device: str, first: bool) -> None:
    """One weight from the first rank's device to all; the host's copy of it goes."""
    if first:
        weight.data = weight.data.to(device).contiguous()
    if weight.numel():  # as bytes, since not every backend knows every dtype
        dist.broadcast(weight.data.reshape(-1).view(torch.uint8), src=0)


# -- the structure -----------------------------------------------------------------------------------------------------


class _Emptying(pickle.Pickler):
    """Pickles with the place of each weight in place of it. Tied weights are one object, and stay one."""

    def __init__(self, file: Any, weights: dict[int, Tensor]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.weights = weights
        self.found: list[Tensor] = []

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or id(value) not in self.weights:
            return NotImplemented
        if type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided:
            raise pickle.PicklingError(f"{type(value).__name__} holds more than its numbers")
        self.found.append(value)
        return _Rooms.make, (len(self.found) - 1, type(value), value.shape, value.dtype, value.requires_grad)


class _Rooms:
    """Unpickled weights, on a device, in the order of their places."""

    device = "cpu"
    made: list[Tensor]

    @classmethod
    def make(cls, place: int, kind: type, shape: torch.Size, dtype: torch.dtype, gradient: bool) -> Tensor:
        assert place == len(cls.made)
        room = torch.empty(shape, dtype=dtype, device=cls.device)
        cls.made.append(nn.Parameter(room, gradient) if kind is nn.Parameter else room.requires_grad_(gradient))
        return cls.made[-1]


def emptied(value: Any, weights: list[Tensor]) -> bytes | None:
    """The structure of `value`, whose weights are appended to `weights`; None if it cannot be pickled."""
    modules = [part for part in getattr(value, "components", {}).values() if isinstance(part, nn.Module)]
    known = {id(tensor): tensor for module in modules for tensor in (*module.parameters(), *module.buffers())}
    file = io.BytesIO()
    pickler = _Emptying(file, known)
    try:
        pickler.dump(value)
    except Exception:  # a lambda, a lock, a file: whatever a component holds
        return None
    weights += pickler.found
    return file.getvalue()


def filled(structure: bytes, weights: list[Tensor], device: str) -> Any:
    """The value of that structure, with room for its weights on `device`; they are appended to `weights`."""
    _Rooms.device, _Rooms.made = device, weights
    try:
        return pickle.loads(structure)
    finally:
        _Rooms.device, _Rooms.made = "cpu", []
