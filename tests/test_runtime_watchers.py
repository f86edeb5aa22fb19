"""`Handle.also`, and the features that look on: stop watch, FLOP meter, progress bar."""

from __future__ import annotations

import io
from typing import Any

import pytest
import tiny
import torch
from rich.console import Console

from chitu_diffusion import Static, patch
from chitu_diffusion.evaluation.parity import Probe
from chitu_diffusion.runtime import Progress, Stopwatch
from chitu_diffusion.runtime.metrics import STAGES, FlopMeter
from chitu_hooks import Feature, PatchError, Refusal, RefusedError


def state(pipe: Any) -> list[Any]:
    """What patching could have changed."""
    modules = [
        module for part in pipe.components.values() if isinstance(part, torch.nn.Module) for module in part.modules()
    ]
    slots = [vars(module).get("_compiled_call_impl", "absent") for module in modules]
    processors = [type(module.processor) for module in modules if hasattr(module, "processor")]
    return [type(pipe), sorted(vars(pipe)), slots, processors]


@pytest.mark.parametrize("cache", [None, Static(steps=(0, 2))], ids=["plain", "cached"])
def test_a_joined_feature_acts_and_leaves_the_handle_as_it_was(cache: Any) -> None:
    pipe = tiny.build("flux")
    tiny.run("flux", pipe)
    bare = state(pipe)
    with patch(pipe, cache=cache) as handle:
        expected = tiny.run("flux", pipe)
        hooked, features = state(pipe), handle.features
        probe = Probe()
        with handle.also(probe) as same:
            assert same is handle and probe in handle.features
            assert torch.equal(tiny.run("flux", pipe), expected)
            if cache is None:
                assert state(pipe) != hooked
        assert probe.idle(handle.sites) == []
        calls = dict(probe.calls)
        assert state(pipe) == hooked and handle.features == features
        assert torch.equal(tiny.run("flux", pipe), expected)
        assert dict(probe.calls) == calls, "it is not called any more"
    assert state(pipe) == bare


def test_a_joined_feature_stays_only_as_long_as_its_block_even_after_an_exception() -> None:
    pipe = tiny.build("flux")
    with patch(pipe) as handle:
        before = state(pipe)
        with pytest.raises(ZeroDivisionError), handle.also(Probe()):
            raise ZeroDivisionError
        assert state(pipe) == before and handle.features == ()


class Unwilling(Feature):
    """Refuses every pipeline."""

    name = "unwilling"

    def bind(self, sites: Any, hook_map: Any) -> Refusal:
        return Refusal("no reason at all")


def test_also_refuses_what_patch_refuses() -> None:
    pipe = tiny.build("flux")
    with patch(pipe) as handle:
        before = state(pipe)
        with pytest.raises(RefusedError, match="unwilling: no reason"), handle.also(Unwilling()):
            pass
        with pytest.raises(PatchError, match="'probe' is given 2 times"), handle.also(Probe(), Probe()):
            pass
        assert state(pipe) == before
    with pytest.raises(PatchError, match="any more"), handle.also(Probe()):
        pass


def test_the_stop_watch_waits_for_the_device_where_a_stage_ends_and_nowhere_else() -> None:
    pipe = tiny.build("flux")
    waits: list[int] = []
    with patch(pipe) as handle:
        for steps in (3, 9):
            waits.clear()
            watch = Stopwatch(lambda: waits.append(1))
            with handle.also(watch):
                tiny.run("flux", pipe, steps=steps)
            assert watch.steps == steps
            assert len(waits) == 4, "begin, first denoiser call, last step, end"
            assert list(watch.seconds) == [stage for stage in STAGES if stage != "load"]
            assert all(seconds > 0 for seconds in watch.seconds.values())


def test_the_flop_meter_counts_what_was_skipped() -> None:
    pipe = tiny.build("flux")
    found = {}
    for name, cache in (("full", None), ("half", Static(steps=(0, 2)))):
        meter = FlopMeter()
        with patch(pipe, cache=cache) as handle, handle.also(meter):
            tiny.run("flux", pipe)
        found[name] = meter.flops
    assert found["full"]["saved"] == 0 < found["full"]["spent"] == found["full"]["full"] == found["half"]["full"]
    assert 0.4 < found["half"]["saved"] / found["half"]["full"] < 0.5


def drawn(terminal: bool) -> str:
    pipe = tiny.build("flux")
    screen = io.StringIO()
    progress = Progress(Console(file=screen, force_terminal=terminal, width=100), "denoise")
    with patch(pipe, cache=Static(steps=(0, 2))) as handle, handle.also(progress):
        tiny.run("flux", pipe)
    assert progress.bar is None
    return screen.getvalue()


def test_the_progress_bar_shows_steps_and_hits() -> None:
    text = drawn(terminal=True)
    assert "denoise" in text and "4/4" in text and "4 calls saved" in text


def test_there_is_no_progress_bar_where_there_is_no_terminal() -> None:
    assert drawn(terminal=False) == ""


def test_looking_on_compiles_nothing_anew() -> None:
    """Neither a joined feature nor the thread of `Stages` adds a graph to blocks that are compiled already."""
    from torch._dynamo.testing import CompileCounter

    from chitu_diffusion.runtime import Stages

    torch.compiler.reset()
    pipe = tiny.build("flux")
    graphs = CompileCounter()
    pipe.transformer.compile_repeated_blocks(fullgraph=True, backend=graphs)
    with patch(pipe, attention="sdpa_math", cache=Static(steps=(0, 2))) as handle:
        expected = tiny.run("flux", pipe)
        first = graphs.frame_count
        assert 0 < first <= 4
        for _ in range(3):
            watch = Stopwatch()
            with handle.also(watch, FlopMeter()):
                assert torch.equal(tiny.run("flux", pipe), expected)
            assert watch.steps == 4
            with Stages(handle, **tiny.call_arguments("flux")) as stages:
                assert torch.equal(stages.output()[0], expected)
        assert graphs.frame_count == first
    torch.compiler.reset()
