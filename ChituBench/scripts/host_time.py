"""What the host needs for one block, on every rank: a rank whose host is late holds up the others."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

BLOCKS = 12
"""Over which the time is taken: their kernels fit into the queue of 1024 launches, so that the GPU does not hold up the host."""

NAMES = ("host_us_a_block", "host_processor_us_a_block", "host_interruptions")


def host_time(blocks: list[torch.nn.Module], run: Callable[[Callable[[], None]], Any], wait: Callable[[], None]) -> Any:
    """Of the first blocks of a step that begins with an empty queue: microseconds a block on the clock, microseconds that
    the thread was running, and how often it was interrupted; each a list with one entry a rank.

    A host whose processor time is well below its time on the clock was kept from running, and is not slow by itself.

    Args:
        blocks: in the order in which they are called.
        run: makes a call of some steps, and calls what it is given after each.
        wait: until the device has done everything.
    """
    first, last = blocks[0], blocks[: BLOCKS + 1][-1]
    marks: list[tuple[float, float, int]] = []
    before: dict[torch.nn.Module, Any] = {}
    steps = [0]

    def mark() -> None:
        interruptions = resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw
        marks.append((time.perf_counter(), time.thread_time(), interruptions))

    def count() -> None:
        steps[0] += 1
        if steps[0] == 2:
            wait()
            before.update({block: block._compiled_call_impl for block in (first, last)})
            for block, impl in before.items():
                block._compiled_call_impl = _marking(impl or block._call_impl, mark)
        elif steps[0] == 3:
            unmark()

    def unmark() -> None:
        while before:
            block, impl = before.popitem()
            block._compiled_call_impl = impl

    try:
        run(count)
        wait()
    finally:
        unmark()  # a run that failed, or had two steps, leaves no marks for what is measured next
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, _between(marks, min(BLOCKS, len(blocks) - 1)))
    if None in found:  # a CUDA graph calls no blocks, and of guidance one rank may call none
        return {}
    return {name: [one[place] for one in found] for place, name in enumerate(NAMES)}


def _between(marks: list[tuple[float, float, int]], blocks: int) -> tuple[int, int, int] | None:
    if len(marks) < 2 or not blocks:
        return None
    (clock, running, interrupted), (later, ran, interruptions) = marks[:2]
    return round(1e6 * (later - clock) / blocks), round(1e6 * (ran - running) / blocks), interruptions - interrupted


def _marking(impl: Callable[..., Any], mark: Callable[[], None]) -> Callable[..., Any]:
    def marked(*args: Any, **kwargs: Any) -> Any:
        mark()
        return impl(*args, **kwargs)

    return marked
