"""Contract 8: no silent no-op. The report says what was asked for, what acts, and what happened."""

from __future__ import annotations

import json
from typing import Any

import pytest
from probes import Keep, Scale, Watch
from tiny import ALL, build, call_arguments, run

from chitu_hooks import Feature, patch

STEPS = 5


@pytest.mark.parametrize("name", ALL)
def test_what_a_step_cache_did(name: str) -> None:
    pipe, cache = build(name), Keep(0, 2)
    with patch(pipe, [cache, Watch()]) as handle:
        before = handle.report()
        assert before.active and before.steps is None and not before.branches and not before.bytes_held
        run(name, pipe, STEPS)
        report = handle.report()
    assert report.pipeline == type(build(name)).__name__
    assert report.active and not handle.report().active
    assert [feature["name"] for feature in report.features] == ["watch", "keep"]
    assert [feature["exactness"] for feature in report.features] == ["exact", "lossy"]
    assert report.features[0]["calls"] == STEPS * ALL[name].branches, "a feature's own report is in it"
    assert report.sites["denoisers"] == 1
    assert report.sites["blocks"] == len(handle.sites.blocks) > 0
    assert report.sites["attention layers"] == len(handle.sites.attention) > 0
    assert report.steps == STEPS
    assert len(report.branches) == ALL[name].branches
    for calls in report.branches.values():
        assert calls == {"computed": 2, "skipped": STEPS - 2, "replaced": 0}
    assert sum(cache.skips) == sum(calls["skipped"] for calls in report.branches.values())
    assert report.bytes_held > 0
    outside = {child for child, _ in pipe.transformer.named_children()} - {s.path for s in handle.sites.stacks}
    assert set(report.still_runs) >= outside
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()
    text = str(report)
    for word in (report.pipeline, "keep (lossy)", "2 computed, 3 skipped", "MiB", report.still_runs[0]):
        assert word in text


def test_bytes_held_are_the_residuals() -> None:
    with patch(build("wan"), [Keep(0)]) as handle:
        run("wan", handle.pipe, 3)
        one = handle.report().bytes_held
        run("wan", handle.pipe, 3, batch=2)
        assert handle.report().bytes_held == 2 * one
        run("wan", handle.pipe, 3, guided=False)
        assert 2 * handle.report().bytes_held == one, "one branch in place of two"
    tokens, channels, branches = 3 * 1 * 1, 2 * 12, 2
    assert one == tokens * channels * 4 * branches


def test_without_features_and_after_undo() -> None:
    pipe = build("flux")
    handle = patch(pipe)
    assert "none (exact)" in str(handle.report())
    assert handle.report().features == []
    handle.undo()
    assert "(undone)" in str(handle.report())


class Replaces(Feature):
    """Answers every call after the first with the last prediction: the denoiser does not run at all."""

    name = "replaces"
    exactness = "lossy"

    def denoiser_in(self, call: Any) -> Any:
        return getattr(call.branch.memory(self), "last", None)

    def denoiser_out(self, call: Any) -> None:
        call.branch.memory(self).last = call.sample


@pytest.mark.parametrize("name", ["flux", "wan", "sd3", "lumina2"])
def test_replaced_calls_are_counted_and_run_nothing(name: str) -> None:
    pipe, runs = build(name), []
    pipe.transformer.register_forward_hook(lambda *_: runs.append(1))
    with patch(pipe, [Replaces()]) as handle:
        run(name, pipe, STEPS)
        branches = handle.report().branches
        assert handle.report().bytes_held > 0
    assert len(runs) == len(branches) == ALL[name].branches
    assert all(calls == {"computed": 1, "skipped": 0, "replaced": STEPS - 1} for calls in branches.values())


def test_the_report_is_about_the_last_generation() -> None:
    with patch(build("flux"), [Keep(0), Scale()]) as handle:
        run("flux", handle.pipe, 6)
        run("flux", handle.pipe, 3, guided=False)
        report = handle.report()
    assert report.steps == 3
    assert list(report.branches.values()) == [{"computed": 1, "skipped": 2, "replaced": 0}]


def test_a_second_schedule_within_a_generation_adds_up() -> None:
    """Some pipelines set the timesteps twice in one call; nothing is carried over, and the numbers cover both."""
    pipe, cache = build("flux"), Keep(0)
    with patch(pipe, [cache]) as handle, handle._engine.generate(pipe):
        type(build("flux")).__call__(pipe, **_arguments())
        type(build("flux")).__call__(pipe, **_arguments())
    (calls,) = handle.report().branches.values()
    assert calls == {"computed": 2, "skipped": 4, "replaced": 0}
    assert cache.skips == [False, True, True] * 2


def _arguments() -> dict[str, Any]:
    return call_arguments("flux", 3, guided=False)
