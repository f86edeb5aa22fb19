"""Contract 2: undo is identity, whatever happened in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from probes import Fails, Scale, Watch, every
from snapshot import changes, snapshot
from tiny import ALL, build, run

from chitu_hooks import ChituError, Feature, Handle, Refusal, RefusedError, clock, patch, processors, seam


@pytest.mark.parametrize("name", ALL)
def test_patch_and_undo(name: str) -> None:
    pipe = build(name)
    before = snapshot(pipe)
    handle = patch(pipe, [Watch(), every()])
    hooked = changes(before, snapshot(pipe))
    assert any("pipe" in place for place in hooked)
    assert sum(seam.SLOT in place for place in hooked) >= 1 + len(handle.sites.blocks)
    assert any("processor.class" in place for place in hooked)
    assert not any("state_dict" in place for place in hooked), "the patch itself leaves state_dict alone"
    handle.undo()
    assert not changes(before, snapshot(pipe))


@pytest.mark.parametrize("name", ALL)
def test_patch_run_and_undo(name: str) -> None:
    pipe = build(name)
    stock = run(name, pipe, 2)
    before = snapshot(pipe, ran=True)
    scheduler_keys = set(vars(pipe.scheduler))
    handle = patch(pipe, [Watch(), every(), Scale()])
    assert not torch.equal(run(name, pipe, 2), stock)
    handle.undo()
    assert not changes(before, snapshot(pipe, ran=True))
    assert set(vars(pipe.scheduler)) == scheduler_keys
    assert torch.equal(run(name, pipe, 2), stock)


def test_undo_twice_and_repr() -> None:
    pipe = build("flux")
    before = snapshot(pipe)
    handle = patch(pipe, [Watch()])
    assert handle.active
    assert "FluxPipeline: watch" in repr(handle)
    handle.undo()
    handle.undo()
    assert not handle.active
    assert "undone" in repr(handle)
    assert not changes(before, snapshot(pipe))
    again = patch(pipe, [Watch()])
    handle.undo()
    assert again.active and vars(pipe).get("_chitu_handle") is not None, "an undone handle does not undo its successor"
    again.undo()
    assert not changes(before, snapshot(pipe))


def test_exception_inside_with() -> None:
    pipe = build("wan")
    before = snapshot(pipe)
    with pytest.raises(ZeroDivisionError), patch(pipe, [Watch(), every()]):
        raise ZeroDivisionError
    assert not changes(before, snapshot(pipe))


@pytest.mark.parametrize("name", ["flux", "sd3", "wan", "zimage"])
@pytest.mark.parametrize("where", ["pipeline", "shim", "processor"])
def test_failure_half_way_through_patching(name: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every single installation fails once; all those before it are taken back."""
    owner, function = {
        "pipeline": (clock, "hook_pipeline"),
        "shim": (seam.Shim, "install"),
        "processor": (processors, "hook_processor"),
    }[where]
    original = getattr(owner, function)
    pipe = build(name)
    before = snapshot(pipe)
    stage = 0
    while (handle := _patch_failing_at(stage, owner, function, original, pipe, monkeypatch)) is None:
        assert not changes(before, snapshot(pipe)), f"{where} {stage}"
        stage += 1
    expected = {"pipeline": 1, "shim": 1 + len(handle.sites.blocks), "processor": len(handle.sites.attention)}
    assert stage == expected[where]
    handle.undo()
    assert not changes(before, snapshot(pipe))


def _patch_failing_at(
    stage: int, owner: Any, function: str, original: Any, pipe: Any, monkeypatch: pytest.MonkeyPatch
) -> Handle | None:
    """The handle, or None if patching failed: installation number `stage` raises."""
    calls = 0

    def failing(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > stage:
            raise OSError(f"stage {stage}")
        return original(*args)

    with monkeypatch.context() as patched:
        patched.setattr(owner, function, failing)
        if function == "hook_processor":
            patched.setattr("chitu_hooks.engine.hook_processor", failing)
        try:
            return patch(pipe, [Watch(), every()])
        except OSError:
            return None


class Refuses(Feature):
    name = "refuses"

    def bind(self, sites: Any, hook_map: Any) -> Refusal | None:
        return Refusal("3 heads do not divide by 2", "use 1 or 3 ranks")


@pytest.mark.parametrize(("feature", "error"), [(Refuses(), RefusedError), (Fails("bind"), RuntimeError)])
def test_a_refusal_changes_nothing(feature: Feature, error: type[Exception]) -> None:
    pipe = build("flux")
    before = snapshot(pipe)
    with pytest.raises(error) as caught:
        patch(pipe, [Watch(), every(), feature])
    assert not changes(before, snapshot(pipe))
    if error is RefusedError:
        assert isinstance(caught.value, ChituError)
        assert "refuses: 3 heads do not divide by 2; use 1 or 3 ranks" in str(caught.value)


@pytest.mark.parametrize("name", ["flux", "wan", "sd3"])
@pytest.mark.parametrize("first_out", [0, 1])
def test_two_handles_on_siblings_come_off_in_any_order(name: str, first_out: int) -> None:
    one = build(name)
    other = type(one).from_pipe(one)
    assert other.transformer is one.transformer
    stock = run(name, one, 2)
    before = snapshot(one, ran=True), snapshot(other, ran=True)
    pipes = [one, other]
    scales = [Scale(0.5), Scale(0.25)]
    handles = [patch(pipe, [Watch(), scale, every()]) for pipe, scale in zip(pipes, scales)]
    alone = [run(name, pipe, 2) for pipe in pipes]
    assert not torch.equal(*alone)
    assert not any(torch.equal(latents, stock) for latents in alone)
    handles[first_out].undo()
    assert torch.equal(run(name, pipes[first_out], 2), stock)
    assert torch.equal(run(name, pipes[1 - first_out], 2), alone[1 - first_out]), "the other is hooked as before"
    handles[1 - first_out].undo()
    assert not changes(before[0], snapshot(one, ran=True))
    assert not changes(before[1], snapshot(other, ran=True))
    assert torch.equal(run(name, pipes[1 - first_out], 2), stock)
