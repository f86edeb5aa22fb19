"""What calibration writes and what it leaves as it was: profiles whole or not at all, and random numbers of every device."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from caches import made_up

from chitu_diffusion.flexcache.planning.profile import Profile
from chitu_diffusion.flexcache.planning.rehearse import Calls

SCHEDULER = "FlowMatchEulerDiscreteScheduler"


def test_a_profile_takes_the_place_of_another_at_once(tmp_path: Path) -> None:
    """A reader that has the former file open goes on reading it: nothing is written into it."""
    one, path, reader = Profile.load(made_up("one", SCHEDULER, "velocity")), tmp_path / "profile", tmp_path / "reader"
    one.save(path)
    os.link(path, reader)
    Profile.load(made_up("two", SCHEDULER, "velocity")).save(path)
    assert (Profile.load(path).model, Profile.load(reader).model) == ("two", "one")
    assert {file.name for file in tmp_path.iterdir()} == {"profile", "reader"}


def test_a_profile_that_cannot_be_written_leaves_the_former(tmp_path: Path) -> None:
    profile = Profile.load(made_up("one", SCHEDULER, "velocity"))
    profile.save(tmp_path / "profile")
    broken = Profile(profile.model, profile.key, profile.tables, versions={"torch": object()})  # type: ignore[dict-item]
    with pytest.raises(TypeError):
        broken.save(tmp_path / "profile")
    assert Profile.load(tmp_path / "profile").model == "one"
    assert [file.name for file in tmp_path.iterdir()] == ["profile"]


def draws(**_: Any) -> float:
    return float(torch.rand(()))


def test_calls_draw_the_same_and_leave_random_numbers_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(["a cat", "a dog"], {})
    before = torch.get_rng_state()
    assert calls.run(draws, 0) == calls.run(draws, 0) != calls.run(draws, 1)
    assert torch.equal(torch.get_rng_state(), before)
    # Of every device: seeding is of all, also of those that another denoiser is on.
    asked: list[list[int]] = []

    @contextlib.contextmanager
    def fork_rng(devices: Sequence[int]) -> Iterator[None]:
        asked.append(list(devices))
        yield

    monkeypatch.setattr(torch.random, "fork_rng", fork_rng)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch, "manual_seed", lambda seed: None)
    calls.run(draws, 0)
    assert asked == [[0, 1, 2]]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_random_numbers_of_all_gpus_are_as_they_were() -> None:
    for device in range(torch.cuda.device_count()):
        torch.rand(1, device=f"cuda:{device}")
    before = torch.cuda.get_rng_state_all()
    Calls(["a cat"], {}).run(draws, 0)
    after = torch.cuda.get_rng_state_all()
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
