"""Contract 3: nothing is visible outside the patched pipeline, and nothing outlives the last handle."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import pickle
from typing import Any

import diffusers
import pytest
import torch
import wrapt
from diffusers.models import attention_dispatch
from probes import Scale, Watch, every
from snapshot import changes, snapshot
from tiny import ALL, build, run

from chitu_hooks import clock, patch, processors, seam

NAMES = tuple(ALL)


def hooked(pipe: Any) -> tuple[Watch, Any]:
    """A patch on all four seams whose action shows in the picture."""
    watch = Watch()
    return watch, patch(pipe, [watch, every(), Scale()])


def sibling_of(pipe: Any, **parts: Any) -> Any:
    sibling = type(pipe).from_pipe(pipe, **parts)
    sibling.set_progress_bar_config(disable=True)
    if hasattr(pipe, "default_sample_size"):
        sibling.default_sample_size = pipe.default_sample_size
    return sibling


def assert_stock(transformer: torch.nn.Module, like: torch.nn.Module) -> None:
    """No trace of a hook in `transformer`; `like` was never patched."""
    for (path, module), other in zip(transformer.named_modules(), like.modules(), strict=True):
        assert vars(module).get(seam.SLOT) is None, path
        assert type(module) is type(other)
        processor, stock = getattr(module, "processor", None), getattr(other, "processor", None)
        assert type(processor) is type(stock), path
        if processor is not None:
            assert vars(processor).keys() == vars(stock).keys(), path


@pytest.mark.parametrize("name", NAMES)
def test_a_sibling_that_shares_the_transformer_runs_unhooked(name: str) -> None:
    pipe = build(name)
    stock = run(name, pipe, 2)
    before = sibling_of(pipe)
    watch, handle = hooked(pipe)
    after = sibling_of(pipe)
    for sibling in (before, after):
        assert sibling.transformer is pipe.transformer
        assert type(sibling) is type(build(name))
        assert torch.equal(run(name, sibling, 2), stock)
    assert watch.counts.keys() == {"bind"}
    assert not torch.equal(run(name, pipe, 2), stock)
    for sibling in (before, after):
        assert torch.equal(run(name, sibling, 2), stock), "also after the patched one has run"
    handle.undo()


def test_a_sibling_of_another_class() -> None:
    pipe = build("flux")
    _, handle = hooked(pipe)
    other = diffusers.FluxImg2ImgPipeline.from_pipe(pipe)
    assert type(other) is diffusers.FluxImg2ImgPipeline
    assert not any("chitu" in key for key in vars(other))
    handle.undo()


@pytest.mark.parametrize("name", ["flux", "sd3"])
def test_a_sibling_running_inside_the_generation(name: str) -> None:
    """The worst case: the sibling runs in a callback, while the patched pipeline is generating."""
    pipe = build(name)
    sibling = sibling_of(pipe, scheduler=copy.deepcopy(pipe.scheduler))
    stock = run(name, sibling, 2)
    watch, handle = hooked(pipe)
    alone = run(name, pipe, 3)
    seen = watch.counts.copy()
    inside = []

    def callback(pipe: Any, step: int, timestep: Any, kwargs: Any) -> dict[str, Any]:
        inside.append(run(name, sibling, 2))
        return {}

    # A partial is no function: whatever can be called as a callback counts as one.
    with_sibling = run(name, pipe, 3, callback_on_step_end=functools.partial(callback))
    handle.undo()
    assert len(inside) == 3
    assert all(torch.equal(latents, stock) for latents in inside)
    assert torch.equal(with_sibling, alone)
    assert watch.counts["attention"] == 2 * seen["attention"]


@pytest.mark.parametrize("name", NAMES)
def test_another_pipeline_of_the_same_class(name: str) -> None:
    pipe, other = build(name), build(name)
    stock = run(name, other, 2)
    before = snapshot(other, ran=True)
    watch, handle = hooked(pipe)
    assert torch.equal(run(name, other, 2), stock)
    assert not changes(before, snapshot(other, ran=True))
    assert watch.counts.keys() == {"bind"}
    handle.undo()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", ["deepcopy pipe", "deepcopy transformer", "pickle transformer"])
def test_copies_are_unhooked(name: str, how: str) -> None:
    pipe, like = build(name), build(name)
    stock = run(name, pipe, 2)
    watch, handle = hooked(pipe)
    if how == "deepcopy pipe":
        twin = copy.deepcopy(pipe)
        assert type(twin) is type(like)
        assert not any("chitu" in key for key in vars(twin))
    else:
        copied = copy.deepcopy(pipe.transformer) if "deepcopy" in how else pickle.loads(pickle.dumps(pipe.transformer))
        twin = build(name)
        twin.transformer = copied
    assert_stock(twin.transformer, like.transformer)
    for parameter in pipe.transformer.parameters():
        parameter.zero_()
    assert torch.equal(run(name, twin, 2), stock), "the copy computes with its own weights, by stock code"
    assert watch.counts.keys() == {"bind"}
    with patch(twin, [Scale()]):
        assert not torch.equal(run(name, twin, 2), stock), "and can be patched itself"
    handle.undo()


@pytest.mark.parametrize("name", ["flux", "sd3", "wan"])
def test_copies_made_during_a_generation(name: str) -> None:
    pipe, like = build(name), build(name)
    stock = run(name, pipe, 2)
    _, handle = hooked(pipe)
    copies = []

    def callback(pipe: Any, step: int, timestep: Any, kwargs: Any) -> dict[str, Any]:
        copies.append(copy.deepcopy(pipe))
        return {}

    run(name, pipe, 2, callback_on_step_end=callback)
    handle.undo()
    for twin in copies:
        assert_stock(twin.transformer, like.transformer)
        for key in ("step", "set_timesteps"):
            method = getattr(twin.scheduler, key)
            assert not isinstance(method, wrapt.ObjectProxy), f"{key} of the scheduler's copy is still wrapped"
            assert method.__self__ is twin.scheduler
        assert torch.equal(run(name, twin, 2), stock)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_outlives_the_last_handle(name: str) -> None:
    for _ in range(2):  # the first frees patched pipelines of earlier tests, the second the classes that they were of
        gc.collect()
    assert not processors._HOOKED and not clock._HOOKED, "left over by an earlier test"
    sdpa, dispatch = torch.nn.functional.scaled_dot_product_attention, attention_dispatch.dispatch_attention_fn
    backend = attention_dispatch._AttentionBackendRegistry.get_active_backend()
    pipe = build(name)
    _, handle = hooked(pipe)
    run(name, pipe, 2)
    assert torch.nn.functional.scaled_dot_product_attention is sdpa
    assert attention_dispatch.dispatch_attention_fn is dispatch
    assert attention_dispatch._AttentionBackendRegistry.get_active_backend() == backend
    assert len(clock._HOOKED) == 1
    assert len(processors._HOOKED) >= 1
    handle.undo()
    del handle
    gc.collect()
    assert not processors._HOOKED
    assert not clock._HOOKED
    assert processors.ACTIVE.call is processors.ACTIVE.attention is processors.ACTIVE.frame is None


def test_a_pipeline_that_goes_away_without_undo() -> None:
    pipe = build("flux")
    hooked(pipe)
    run("flux", pipe, 1)
    del pipe
    gc.collect()
    gc.collect()  # the classes, after the objects
    assert not processors._HOOKED
    assert not clock._HOOKED


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_wrappers_on_a_shared_component_end_in_any_order(order: tuple[int, ...]) -> None:
    class Owner:
        def method(self) -> list[int]:
            return []

    owner = Owner()

    def wrapper(number: int) -> Any:
        return lambda wrapped, instance, args, kwargs: [number, *wrapped(*args, **kwargs)]

    stacks = [contextlib.ExitStack() for _ in order]
    for number, stack in enumerate(stacks):
        stack.enter_context(clock.instance_wrapper(owner, "method", wrapper(number)))
    left = [2, 1, 0]
    for number in order:
        assert owner.method() == left
        stacks[number].close()
        left.remove(number)
    assert not vars(owner)


def test_a_layer_is_told_to_features_as_a_living_handle_finds_it() -> None:
    pipe = build("flux")
    _, first = hooked(pipe)
    _, second = hooked(sibling_of(pipe))
    first.undo()
    reachable = [site for site in second.sites.attention if site.reachable]
    assert reachable
    for site in reachable:
        assert vars(site.module.processor)[processors.MARK].site(site.module) is site
    second.undo()
