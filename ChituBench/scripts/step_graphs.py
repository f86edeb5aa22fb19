"""A denoiser's forward as CUDA graphs: recorded once for every form of its arguments, replayed from then on.

Recorded is what runs below the hooks of the denoiser seam: blocks, exchanges between ranks (NCCL can be recorded) and
whatever a feature does at the trunk and in attention. So it holds for features that do the same at every call, kernels and
parallelism, and not for caches. What a feature does around the denoiser, guidance say, still runs at every call.

The host then launches one graph in place of some 1500 kernels. Without a GPU there is nothing to record: "replaying" runs the
forward again on the same static tensors, which tries everything but the recording.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from chitu_hooks.call import map_tensors

WARM_UP = 2
"""Calls of each form before the recording: they compile, choose algorithms and connect the ranks, which no graph can hold."""


class Recording:
    """One form of arguments: tensors at fixed addresses, and what they are turned into."""

    def __init__(self, args: Any) -> None:
        self.static = map_tensors(args, lambda tensor: tensor.clone(memory_format=torch.contiguous_format))
        self.calls = 0
        self.replay: Callable[[], Any] | None = None
        self.outputs: Any = None


class StepGraphs:
    """In place of ``module.forward``.

    Args:
        forward: what is recorded.
        device: where its tensors are.
    """

    def __init__(self, forward: Callable[..., Any], device: torch.device) -> None:
        self.forward = forward
        self.device = device
        self.recordings: dict[Any, Recording] = {}
        self.replays = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = (args, kwargs)
        key = form_of(given)
        recording = self.recordings.get(key)
        if recording is None:
            recording = self.recordings[key] = Recording(given)
        for target, source in zip(tensors_of(recording.static), tensors_of(given)):
            target.copy_(source)
        recording.calls += 1
        if recording.calls <= WARM_UP:
            return self._run(recording)
        if recording.replay is None:
            self._record(recording)
        recording.replay()  # type: ignore[misc]
        self.replays += 1
        # A copy: the next replay, of another branch of guidance say, writes to the same place.
        return map_tensors(recording.outputs, Tensor.clone)

    def _run(self, recording: Recording) -> Any:
        args, kwargs = recording.static
        return self.forward(*args, **kwargs)

    def _record(self, recording: Recording) -> None:
        if self.device.type != "cuda":

            def again() -> None:
                recording.outputs = self._run(recording)

            recording.replay = again
            return
        graph = torch.cuda.CUDAGraph()
        # Calls of other threads, such as NCCL's watchdog, do not disturb the recording.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            recording.outputs = self._run(recording)
        recording.replay = graph.replay


def form_of(value: Any) -> Any:
    """What has to be the same for a recording to stand for a call: shapes and types of tensors, and all other values."""
    if isinstance(value, Tensor):
        return (value.shape, value.dtype, value.device)
    if isinstance(value, (list, tuple)):
        return tuple(form_of(item) for item in value)
    if isinstance(value, dict):
        return tuple((name, form_of(item)) for name, item in value.items())
    return value


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested arguments, in the order in which `map_tensors` meets them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_of(item)


@contextlib.contextmanager
def recorded(module: nn.Module, device: torch.device) -> Iterator[StepGraphs]:
    """`module` with its forward recorded, for a while. Enter it before patching: the hooks are to stay outside."""
    before = vars(module).get("forward")
    graphs = StepGraphs(module.forward, device)

    @functools.wraps(module.forward)  # the hooks read the names of the denoiser's arguments there
    def forward(*args: Any, **kwargs: Any) -> Any:
        return graphs(*args, **kwargs)

    module.forward = forward  # type: ignore[method-assign]
    try:
        yield graphs
    finally:
        graphs.recordings.clear()
        if before is None:
            del module.forward
        else:
            module.forward = before
