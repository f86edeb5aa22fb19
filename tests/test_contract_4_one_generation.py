"""Contract 4: state lives for one generation; whatever came before, a call equals a fresh handle's bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from probes import Keep, Watch, reachable_tensors
from tiny import TINY, build, run

from chitu_hooks import Feature, PatchError, patch

STEPS = 5
COMPUTED = (0, 2)


class Stop(Exception):
    pass


def raising(error: type[BaseException]) -> Callable[..., Any]:
    def callback(pipe: Any, step: int, timestep: Any, kwargs: Any) -> dict[str, Any]:
        if step == 2:
            raise error
        return {}

    return callback


def interrupting(pipe: Any, step: int, timestep: Any, kwargs: Any) -> dict[str, Any]:
    pipe._interrupt = step == 2
    return {}


def failing_call(name: str, pipe: Any, error: type[BaseException]) -> None:
    """A block raises in the second step that is computed. (A skipped block's hooks do not run.)"""
    calls = 0

    def hook(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > TINY[name].branches:
            raise error

    last = [module for module in pipe.transformer.children() if isinstance(module, torch.nn.ModuleList)][-1][-1]
    handle = last.register_forward_pre_hook(hook)
    try:
        with pytest.raises(error):
            run(name, pipe, STEPS + 2)
    finally:
        handle.remove()
    assert calls == TINY[name].branches + 1


def failing_callback(name: str, pipe: Any, error: type[BaseException]) -> None:
    with pytest.raises(error):
        run(name, pipe, STEPS, callback_on_step_end=raising(error))


def other_scheduler(name: str, pipe: Any) -> None:
    """Users swap schedulers after patching; the old one is not touched any more."""
    old = pipe.scheduler
    pipe.scheduler = type(old).from_config(old.config)
    run(name, pipe, STEPS)
    assert not {"step", "set_timesteps"} & vars(pipe.scheduler).keys()
    pipe.scheduler = old


def wrong_argument(name: str, pipe: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        pipe(nonsense=1)


EVENTS: dict[str, Callable[[str, Any], Any]] = {
    "other seed": lambda name, pipe: run(name, pipe, STEPS, seed=7),
    "other prompt": lambda name, pipe: run(name, pipe, STEPS, prompt=3),
    "other length": lambda name, pipe: run(name, pipe, STEPS, length=9),
    "bigger": lambda name, pipe: run(name, pipe, STEPS, **TINY[name].bigger),
    "fewer steps": lambda name, pipe: run(name, pipe, 3),
    "more steps": lambda name, pipe: run(name, pipe, 8),
    "one step": lambda name, pipe: run(name, pipe, 1),
    "batch of two": lambda name, pipe: run(name, pipe, STEPS, batch=2),
    "guidance off": lambda name, pipe: run(name, pipe, STEPS, guided=False),
    "other scheduler": other_scheduler,
    "exception in a callback": lambda name, pipe: failing_callback(name, pipe, Stop),
    "keyboard interrupt": lambda name, pipe: failing_callback(name, pipe, KeyboardInterrupt),
    "exception in a block": lambda name, pipe: failing_call(name, pipe, Stop),
    "keyboard interrupt in a block": lambda name, pipe: failing_call(name, pipe, KeyboardInterrupt),
    "interrupt": lambda name, pipe: run(name, pipe, STEPS, callback_on_step_end=interrupting),
    "call with a wrong argument": wrong_argument,
}
NO_CALLBACK = ("pixart",)
"""Pipelines that take no `callback_on_step_end`."""


@pytest.mark.parametrize("name", TINY)
def test_no_event_leaves_a_trace(name: str) -> None:
    pipe = build(name)
    stock = run(name, pipe, STEPS)
    big_stock_shape = run(name, pipe, STEPS, **TINY[name].bigger).shape
    with patch(build(name), [Keep(*COMPUTED)]) as handle:
        fresh = run(name, handle.pipe, STEPS)
    with patch(build(name), [Keep(*COMPUTED)]) as handle:
        fresh_big = run(name, handle.pipe, STEPS, **TINY[name].bigger)
    assert not torch.equal(fresh, stock)
    assert fresh_big.shape == big_stock_shape != fresh.shape

    cache = Keep(*COMPUTED)
    with patch(pipe, [cache, Watch()]) as handle:
        for event, happen in EVENTS.items():
            if name in NO_CALLBACK and ("callback" in event or event in ("keyboard interrupt", "interrupt")):
                continue
            happen(name, pipe)
            assert handle._engine.generation is None, event
            assert not {"step", "set_timesteps"} & vars(pipe.scheduler).keys(), event
            assert not reachable_tensors(handle), event
            assert torch.equal(run(name, pipe, STEPS), fresh), event
            happen(name, pipe)
            assert torch.equal(run(name, pipe, STEPS, **TINY[name].bigger), fresh_big), event
            assert not reachable_tensors(handle), event
    assert sum(cache.skips) > len(EVENTS) * STEPS


def test_memory_is_reachable_while_generating() -> None:
    """Otherwise the assertion above, that nothing is reachable afterwards, would be empty."""
    pipe = build("flux")
    held = []

    def callback(pipe: Any, step: int, timestep: Any, kwargs: Any) -> dict[str, Any]:
        held.append(len(reachable_tensors(handle)))
        return {}

    with patch(pipe, [Keep(*COMPUTED)]) as handle:
        run("flux", pipe, STEPS, callback_on_step_end=callback)
    assert held[-1] >= 2 * 2 * 2, "two branches, two stacks, two streams"


class Remembers(Feature):
    """Keeps a tensor in each of the two places that are meant for it."""

    name = "remembers"

    def denoiser_out(self, call: Any) -> None:
        call.generation.memory(self).last = call.branch.memory(self).last = call.sample


def test_what_features_remember_is_dropped() -> None:
    pipe = build("flux")
    with patch(pipe, [Remembers()]) as handle:
        run("flux", pipe, 2)
        assert handle.report().bytes_held > 0
        assert not reachable_tensors(handle)


def test_undo_while_generating_refuses() -> None:
    pipe = build("flux")
    stock = run("flux", pipe, 3)
    refused = []

    def callback(pipe: Any, step: int, timestep: Any, kwargs: Any) -> dict[str, Any]:
        with pytest.raises(PatchError, match="generating"):
            handle.undo()
        refused.append(step)
        return {}

    handle = patch(pipe, [Watch()])
    assert torch.equal(run("flux", pipe, 3, callback_on_step_end=callback), stock)
    assert refused == [0, 1, 2]
    assert handle.active
    handle.undo()
    assert torch.equal(run("flux", pipe, 3), stock)


def test_a_pipeline_that_copies_its_scheduler() -> None:
    """Fifteen pipelines deep-copy their scheduler inside the call and step both."""
    pipe, watch = build("wan"), Watch()
    stock = run("wan", pipe, STEPS)
    copies = []

    def hook(module: Any, args: Any) -> None:
        twin = copy.deepcopy(pipe.scheduler)
        assert twin.step.__self__ is twin
        twin.set_timesteps(9)
        copies.append(twin)

    with patch(pipe, [watch]):
        handle = pipe.transformer.register_forward_pre_hook(hook)
        assert torch.equal(run("wan", pipe, STEPS), stock)
        handle.remove()
    assert len(copies) == 2 * STEPS
    assert [position for position, _, _ in watch.steps] == list(range(STEPS)), "steps of a copy are not ours"
    assert {number for _, _, number in watch.steps} == {STEPS}


def test_every_feature_ends_also_where_another_one_fails_to() -> None:
    class Ends(Feature):
        def __init__(self, name: str, error: type[Exception] | None = None) -> None:
            self.name, self.error, self.ended = name, error, 0

        def end(self, generation: Any) -> None:
            self.ended += 1
            if self.error is not None:
                raise self.error

    pipe = build("flux")
    features = [Ends("first"), Ends("failing", Stop), Ends("last")]
    with patch(pipe, features):
        for count in (1, 2):
            with pytest.raises(Stop):
                run("flux", pipe, 2)
            assert [feature.ended for feature in features] == [count] * 3
