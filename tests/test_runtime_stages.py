"""`Stages`: every stage by itself, all of them in a row equal to ``pipe(...)``, and nothing left behind."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import tiny
import torch

from chitu_diffusion import Static, patch
from chitu_diffusion.runtime import Stages
from chitu_diffusion.runtime.relay import Closed, Relay
from chitu_hooks import Feature, GenerationError, PatchError

CACHES = {"plain": None, "cached": Static(steps=(0, 2))}


def arguments(name: str, **over: Any) -> dict[str, Any]:
    return tiny.call_arguments(name, steps=4) | {"output_type": "pt", **over}


def picture(output: Any) -> torch.Tensor:
    return torch.as_tensor(output[0])


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "chitu-stages"]


class Counting:
    """Calls of the denoiser, the scheduler and the VAE, counted by torch's hooks and by a wrapper of the test's own."""

    def __init__(self, pipe: Any) -> None:
        self.denoiser = self.decoded = 0
        pipe.transformer.register_forward_hook(self._denoiser)
        decode = pipe.vae.decode

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.decoded += 1
            return decode(*args, **kwargs)

        pipe.vae.decode = counted

    def _denoiser(self, *_: Any) -> None:
        self.denoiser += 1


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not workers()


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", tiny.TINY)
def test_all_stages_in_a_row_are_the_call(name: str, cache: str) -> None:
    pipe = tiny.build(name)
    with patch(pipe, cache=CACHES[cache]) as handle:
        expected = picture(pipe(**arguments(name)))
        expected_branches = handle.report().branches
        with Stages(handle, **arguments(name)) as stages:
            stages.prepare()
            steps = len(list(stages.steps()))
            stages.decode()
            output = picture(stages.output())
        assert steps == 4
        assert torch.equal(output, expected)
        skipped = [calls["skipped"] for calls in handle.report().branches.values()]
        if cache == "cached":
            assert handle.report().branches == expected_branches
        assert skipped == [2 if cache == "cached" else 0] * len(skipped) and skipped
        assert not any(feature.name == "stages" for feature in handle.features)


@pytest.mark.parametrize("name", ["flux", "wan", "sd3"])
def test_one_step_is_one_scheduler_step(name: str) -> None:
    pipe = tiny.build(name)
    count = Counting(pipe)
    branches = tiny.TINY[name].branches
    with patch(pipe) as handle, Stages(handle, **arguments(name)) as stages:
        assert (stages.where, stages.latents) == ("start", None)
        stages.prepare()
        assert (stages.where, count.denoiser, count.decoded) == ("prepared", 0, 0)
        seen = []
        for step in range(1, 5):
            seen.append(stages.denoise().clone())
            assert (count.denoiser, count.decoded) == (step * branches, 0)
            assert pipe.scheduler.step_index == step
        assert stages.where == "denoised"
        assert stages.denoise() is None
        assert not any(torch.equal(a, b) for a, b in pairwise(seen))
        stages.decode()
        assert (stages.where, count.denoiser, count.decoded) == ("decoded", 4 * branches, 1)
        stages.output()
        assert (stages.where, count.decoded) == ("ended", 1)


def test_each_stage_runs_those_before_it() -> None:
    pipe = tiny.build("flux")
    with patch(pipe) as handle:
        expected = picture(pipe(**arguments("flux")))
        for first in ("denoise", "decode", "output"):
            with Stages(handle, **arguments("flux")) as stages:
                getattr(stages, first)()
                assert torch.equal(picture(stages.output()), expected)
                assert torch.equal(picture(stages.output()), expected), "output can be asked for again"


def test_load_is_a_stage() -> None:
    made: list[Any] = []

    def load() -> Any:
        made.append(patch(tiny.build("flux")))
        return made[-1]

    with Stages(load, **arguments("flux")) as stages:
        assert not made
        assert stages.load() is made[0]
        assert stages.load() is made[0] and stages.where == "start"
        stages.output()


def test_latents_have_nothing_to_decode() -> None:
    pipe = tiny.build("flux")
    count = Counting(pipe)
    with patch(pipe) as handle:
        expected = picture(pipe(**arguments("flux", output_type="latent")))
        with Stages(handle, **arguments("flux", output_type="latent")) as stages:
            stages.decode()
            assert stages.where == "ended"
            assert torch.equal(picture(stages.output()), expected)
    assert count.decoded == 0


class Failing(Feature):
    """Raises at one step."""

    name = "failing"
    at = 2

    def step_in(self, step: Any) -> None:
        if step.step.position == self.at:
            raise ZeroDivisionError("in the worker")


def test_an_exception_surfaces_in_the_caller_and_leaves_the_pipeline_usable() -> None:
    pipe = tiny.build("flux")
    failing = Failing()
    with patch(pipe, features=(failing,)) as handle:
        failing.at = -1
        expected = picture(pipe(**arguments("flux")))
        failing.at = 2
        stages = Stages(handle, **arguments("flux"))
        stages.denoise()
        stages.denoise()
        with pytest.raises(ZeroDivisionError, match="in the worker"):
            stages.denoise()
        assert not workers()
        for stage in (stages.prepare, stages.denoise, stages.decode, stages.output):
            with pytest.raises(PatchError, match="half way"):
                stage()
        failing.at = -1
        assert torch.equal(picture(pipe(**arguments("flux"))), expected)


def test_a_wrong_argument_surfaces_in_prepare() -> None:
    with patch(tiny.build("flux")) as handle, Stages(handle, **arguments("flux", no_such_argument=1)) as stages:
        with pytest.raises(TypeError, match="no_such_argument"):
            stages.prepare()


@pytest.mark.parametrize("upto", ["prepare", "denoise", "decode"])
def test_close_ends_the_call_and_the_thread(upto: str) -> None:
    pipe = tiny.build("flux")
    with patch(pipe, cache=CACHES["cached"]) as handle:
        before = set(vars(pipe.vae)), set(vars(pipe.scheduler))
        expected = picture(pipe(**arguments("flux")))
        stages = Stages(handle, **arguments("flux"))
        getattr(stages, upto)()
        assert len(workers()) == 1
        stages.close()
        stages.close()
        assert not workers()
        assert (
            set(vars(pipe.vae)) - before[0],
            [n for n in vars(pipe.scheduler) if n in ("step", "set_timesteps")],
        ) == (
            set(),
            [],
        )
        assert torch.equal(picture(pipe(**arguments("flux"))), expected)


def test_closing_what_never_began_does_nothing() -> None:
    with patch(tiny.build("flux")) as handle:
        Stages(handle, **arguments("flux")).close()


def test_forgotten_stages_end_their_thread() -> None:
    pipe = tiny.build("flux")
    with patch(pipe) as handle:
        expected = picture(pipe(**arguments("flux")))
        stages = Stages(handle, **arguments("flux"))
        stages.denoise()
        assert len(workers()) == 1
        del stages
        gc.collect()
        assert not workers()
        assert torch.equal(picture(pipe(**arguments("flux"))), expected)


def test_while_a_call_is_half_way_there_is_no_other_and_no_undo() -> None:
    pipe = tiny.build("flux")
    with patch(pipe) as handle, Stages(handle, **arguments("flux")) as stages:
        stages.denoise()
        with pytest.raises(GenerationError, match="another thread"):
            pipe(**arguments("flux"))
        with pytest.raises(PatchError, match="generating"):
            handle.undo()
        with pytest.raises(PatchError, match="generating"):
            Stages(handle, **arguments("flux")).prepare()
        assert stages.denoise() is not None


def _modes() -> tuple[Any, ...]:
    cast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), cast, torch.get_default_device()


@pytest.mark.parametrize(
    "mode",
    [
        lambda: torch.inference_mode(),
        lambda: torch.enable_grad(),
        lambda: torch.no_grad(),
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.device("meta"),
    ],
    ids=["inference", "grad", "no_grad", "autocast", "device"],
)
def test_the_thread_has_the_modes_of_its_maker(mode: Callable[[], Any]) -> None:
    outside = _modes()
    with mode():
        expected = _modes()
        relay = Relay(_modes)
    assert relay.resume() == "ended"
    assert relay.result == expected
    assert _modes() == outside


def test_a_closed_relay_cannot_be_swallowed() -> None:
    ended = []

    def stubborn() -> None:
        try:
            relay.pause("here")
        except Exception:
            ended.append("swallowed")
        finally:
            ended.append("finally")

    relay = Relay(stubborn)
    assert relay.resume() == "here"
    relay.close()
    assert ended == ["finally"]
    assert not issubclass(Closed, Exception)


def test_a_last_step_that_the_schedule_does_not_tell_is_known_by_the_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    from chitu_diffusion.runtime import stages as module

    monkeypatch.setattr(module, "is_last", lambda step: False)
    pipe = tiny.build("flux")
    count = Counting(pipe)
    with patch(pipe) as handle:
        expected = picture(pipe(**arguments("flux")))
        count.decoded = 0
        with Stages(handle, **arguments("flux")) as stages:
            assert len(list(stages.steps())) == 4
            assert (stages.where, count.decoded) == ("decoding", 0)
            assert stages.denoise() is None
            stages.decode()
            assert (stages.where, count.decoded) == ("decoded", 1)
            assert torch.equal(picture(stages.output()), expected)
        latent = arguments("flux", output_type="latent")
        with Stages(handle, **latent) as stages:
            assert len(list(stages.steps())) == 4 and stages.where == "ended"
