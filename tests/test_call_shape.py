"""Steps are read from the scheduler, so neither its order, nor strength, nor stray calls throw the numbers off."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch
from probes import Keep, Watch
from tiny import build, call_arguments, noise, run

from chitu_hooks import Feature, patch


def test_two_stages_of_a_heun_step() -> None:
    scheduler = diffusers.FlowMatchHeunDiscreteScheduler()
    watch, cache = Watch(), Keep(0, 4, 9)
    pipe = build("wan", scheduler=scheduler)
    stock = run("wan", pipe, 10)
    with patch(pipe, [watch, cache]):
        result = run("wan", pipe, 10)
        assert torch.equal(run("wan", pipe, 10), result)
    assert len(watch.positions) == 2 * 38
    stages = [(position, stage) for position, stage, _ in watch.steps[:19]]
    assert stages == [(i, stage) for i in range(10) for stage in (0, 1)][:19], "the last step has one stage"
    assert {number for _, _, number in watch.steps} == {10}
    decisions: dict[tuple[str, int], set[bool]] = {}
    for branch, position, _, skipped in cache.log[2:38]:
        decisions.setdefault((branch, position), set()).add(skipped)
    first = {key for key in decisions if key[1] == 0}
    assert all(len(decision) == 1 for key, decision in decisions.items() if key not in first)
    assert [skipped for _, position, _, skipped in cache.log if position in (0, 4, 9)].count(True) == 0
    assert sum(cache.skips) == 2 * 2 * 2 * 7
    assert not torch.equal(result, stock)


@pytest.mark.parametrize(("strength", "steps"), [(0.3, 3), (0.35, 4), (0.7, 7), (1.0, 10)])
def test_img2img_strength(strength: float, steps: int) -> None:
    pipe = build("flux", cls=diffusers.FluxImg2ImgPipeline)
    image = torch.rand(1, 3, 16, 16, generator=noise(3))
    over = {"image": image, "strength": strength, "guided": False}
    stock = run("flux", pipe, 10, **over)
    watch = Watch()
    with patch(pipe, [watch, Keep(*range(10))]) as handle:
        assert torch.equal(run("flux", pipe, 10, **over), stock)
        assert handle.report().steps == steps
    assert watch.positions == list(range(steps))
    assert [(position, number) for position, _, number in watch.steps] == [(i, steps) for i in range(steps)]
    if steps > 3:
        with patch(pipe, [Keep(0, 1, steps - 1)]) as handle:
            assert not torch.equal(run("flux", pipe, 10, **over), stock)
            (calls,) = handle.report().branches.values()
        assert calls == {"computed": 3, "skipped": steps - 3, "replaced": 0}


@pytest.mark.parametrize("name", ["flux", "wan", "sd3"])
def test_a_manual_call_before_the_pipeline(name: str) -> None:
    pipe, seen = build(name), []
    recorder = pipe.transformer.register_forward_pre_hook(lambda _, a, k: seen.append((a, k)), with_kwargs=True)
    run(name, pipe, 2)
    recorder.remove()
    args, kwargs = seen[0]
    stock = pipe.transformer(*args, **kwargs)[0]
    with patch(build(name), [Keep(0, 2)]) as handle:
        fresh = run(name, handle.pipe, 4)
    watch = Watch()
    with patch(pipe, [watch, Keep(0, 2)]):
        assert torch.equal(pipe.transformer(*args, **kwargs)[0], stock), "outside of a generation nothing is hooked"
        assert watch.counts.keys() == {"bind"}
        assert torch.equal(run(name, pipe, 4), fresh)
        assert torch.equal(pipe.transformer(*args, **kwargs)[0], stock)
        assert torch.equal(run(name, pipe, 4), fresh)


@pytest.mark.parametrize("scheduler", [diffusers.DDIMScheduler, diffusers.PNDMScheduler, diffusers.DDPMScheduler])
def test_schedulers_without_a_step_index(scheduler: Any) -> None:
    pipe = build("pixart", scheduler=scheduler(**({"skip_prk_steps": True} if "PNDM" in scheduler.__name__ else {})))
    assert getattr(pipe.scheduler, "step_index", None) is None
    stock = run("pixart", pipe, 6)
    watch, cache = Watch(), Keep(0, 1, 3)
    with patch(pipe, [watch]):
        assert torch.equal(run("pixart", pipe, 6), stock)
        assert torch.equal(run("pixart", pipe, 6), stock)
    calls = len(watch.positions) // 2
    assert calls >= 6
    assert watch.positions == [*range(calls), *range(calls)]
    assert {number for _, _, number in watch.steps} == {calls}
    with patch(pipe, [cache]):
        assert not torch.equal(run("pixart", pipe, 6), stock)
    assert sum(cache.skips) == calls - 3


def test_a_pipeline_that_looks_ahead_and_rewinds() -> None:
    """One calls ``scheduler.step`` only to get x0, and sets the index back: two calls, still one position."""
    pipe, watch = build("flux"), Watch()

    def look_ahead(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        scheduler = pipe.scheduler
        index = scheduler.step_index
        scheduler.step(output[0], kwargs["timestep"][0] * 1000, kwargs["hidden_states"])
        scheduler._step_index = index

    # The first look-ahead would start the schedule at an index of its own; pipelines that do this set it before.
    pipe.scheduler.set_begin_index(0)
    stock = run("flux", pipe, 5, guided=False)
    hook = pipe.transformer.register_forward_hook(look_ahead, with_kwargs=True)
    rewound = run("flux", pipe, 5, guided=False)
    with patch(pipe, [watch]):
        assert torch.equal(run("flux", pipe, 5, guided=False), rewound)
    hook.remove()
    assert torch.equal(stock, rewound)
    assert watch.positions == list(range(5))
    assert len(watch.steps) == 10
    assert {number for _, _, number in watch.steps} == {5}


class Timesteps(Feature):
    name = "timesteps"

    def __init__(self) -> None:
        self.seen: list[float] = []

    def denoiser_in(self, call: Any) -> None:
        self.seen.append(call.step.timestep)


@pytest.mark.parametrize("name", ["flux", "wan", "pixart", "lumina2"])
def test_timesteps_are_the_schedulers(name: str) -> None:
    pipe, feature = build(name), Timesteps()
    with patch(pipe, [feature]):
        pipe(**call_arguments(name, 4, guided=False))
    assert feature.seen == [float(t) for t in pipe.scheduler.timesteps]
