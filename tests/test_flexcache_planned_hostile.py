"""The planned cache where something is not as it should be: edited files, odd schedulers, calls that end early."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from caches import STEPS, Log
from planned import calibrated, calls
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tiny import build, call_arguments

from chitu_diffusion import Planned, patch
from chitu_hooks import PatchError, RefusedError

pytestmark = pytest.mark.filterwarnings("ignore::chitu_hooks.ChituWarning")


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profiles") / "flux.safetensors"
    calibrated("flux", path)
    return path


def grid(head: Any, tables: Any) -> None:
    head["key"]["grid"]["sigmas"].insert(0, 1.1)


def words(head: Any, tables: Any) -> None:
    head["key"]["grid"]["sigmas"] = ["a"] * (STEPS + 1)


def guidance(head: Any, tables: Any) -> None:
    head["key"]["guidance"] = [1]


def guidance_word(head: Any, tables: Any) -> None:
    head["key"]["guidance"] = {"guidance_scale": "x"}


def check(head: Any, tables: Any) -> None:
    head["checks"][0]["predicted"] = "a"


def check_nan(head: Any, tables: Any) -> None:
    head["checks"][0]["psnr"] = [float("nan")]


def fewer(head: Any, tables: Any) -> None:
    tables["gram"], tables["sigmas"] = tables["gram"][:, 1:, 1:], tables["sigmas"][1:]


def reverse(head: Any, tables: Any) -> None:
    tables["sigmas"] = tables["sigmas"][::-1]


def lengthless(head: Any, tables: Any) -> None:
    tables["gram"] = 0 * tables["gram"]


def negative(head: Any, tables: Any) -> None:
    tables["gram"] = -tables["gram"]


def lopsided(head: Any, tables: Any) -> None:
    tables["gram"][0, 0, 1] = 99


def no_latent(head: Any, tables: Any) -> None:
    tables["final"] = 0 * tables["final"]


def unresponsive(head: Any, tables: Any) -> None:
    tables["response"] = -tables["response"]


EDITS = (
    grid, words, guidance, guidance_word, check, check_nan, fewer, reverse, lengthless, negative, lopsided, no_latent,
    unresponsive,
)  # fmt: skip


@pytest.mark.parametrize("edit", EDITS)
def test_a_profile_that_was_edited_by_hand_is_told(edit: Callable[..., None], flux: Path, tmp_path: Path) -> None:
    path = str(tmp_path / "edited.safetensors")
    with safe_open(flux, "np") as opened:
        head, tables = json.loads(opened.metadata()["chitu"]), load_file(flux)
    for change in (None, edit):
        if change is not None:
            change(head, tables)
        tables = {name: np.ascontiguousarray(table) for name, table in tables.items()}
        save_file(tables, path, metadata={"chitu": json.dumps(head)})
        if change is None:
            patch(build("flux"), cache=Planned(profile=path, psnr=20)).undo()
    with pytest.raises(PatchError, match="is truncated or no profile"):
        patch(build("flux"), cache=Planned(profile=path, psnr=20))


def test_a_profile_of_another_format_is_refused(flux: Path, tmp_path: Path) -> None:
    path = str(tmp_path / "older.safetensors")
    with safe_open(flux, "np") as opened:
        head = json.loads(opened.metadata()["chitu"])
    save_file(load_file(flux), path, metadata={"chitu": json.dumps({**head, "format": 1})})
    with pytest.raises(PatchError, match="has format 1, not 3; calibrate again"):
        patch(build("flux"), cache=Planned(profile=path, budget=0.5))


@pytest.mark.parametrize("profile", [5, True, ("a", "b"), 1.5, "", {"a": 1}])
def test_a_profile_is_the_path_of_a_file(profile: Any) -> None:
    with pytest.raises(PatchError, match="planned: profile is the path of a file, not"):
        Planned(profile=profile, budget=0.5)


def test_a_path_will_do(flux: Path) -> None:
    assert Planned(profile=flux, budget=0.5).profile == str(flux)  # type: ignore[arg-type]


# -- calibration --------------------------------------------------------------------------------------------------------


def test_a_file_that_cannot_be_written_is_told_before_anything_runs(tmp_path: Path) -> None:
    log = Log()
    with patch(build("flux"), features=(log,)) as handle:
        for given in ({"planned": tmp_path / "none" / "p.safetensors"}, {"path": "/proc/none.yaml"}):
            with pytest.raises(PatchError, match=r"calibrate cannot write '.*': .*No such file or directory"):
                handle.calibrate(calls("flux"), **given)  # type: ignore[attr-defined]
    assert not log.calls


def test_calls_that_end_early_are_told(tmp_path: Path) -> None:
    def interrupt(pipe: Any, step: int, timestep: Any, tensors: Any) -> Any:
        pipe._interrupt = step == 4
        return {}

    given = calls("flux")
    given[1]["callback_on_step_end"] = interrupt
    with patch(build("flux")) as handle, pytest.raises(PatchError, match="1 of 4 calls ended before the last"):
        handle.calibrate(given, planned=tmp_path / "p.safetensors")  # type: ignore[attr-defined]
    assert not list(tmp_path.iterdir())


def test_one_step_is_nothing_to_plan(tmp_path: Path) -> None:
    with pytest.raises(PatchError, match="runs of 1 step leave nothing to plan"):
        calibrated("flux", tmp_path / "p.safetensors", steps=1)


def test_a_scheduler_without_sigmas_is_refused(tmp_path: Path) -> None:
    pipe = build("pixart")
    pipe.scheduler = diffusers.IPNDMScheduler()
    with patch(pipe) as handle, pytest.raises(RefusedError, match="IPNDMScheduler has no sigmas"):
        handle.calibrate(calls("pixart"), planned=tmp_path / "p.safetensors")  # type: ignore[attr-defined]


# -- schedulers ---------------------------------------------------------------------------------------------------------


def scheduled(scheduler: Any, dtype: torch.dtype) -> Any:
    pipe = build("pixart")
    pipe.scheduler = scheduler
    return pipe.to(dtype)


def in_dtype(given: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return {name: cast(value) for name, value in given.items()}


SCHEDULERS = {
    "mixes no dtypes": lambda: diffusers.UniPCMultistepScheduler(solver_order=3),
    "promotes": lambda: diffusers.DDIMScheduler(prediction_type="v_prediction", clip_sample=False),
    "keeps its own latent": lambda: diffusers.PNDMScheduler(skip_prk_steps=True),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_any_scheduler_hands_back_the_pipelines_dtype(name: str, tmp_path: Path) -> None:
    """A scheduler that is given float32 in some steps returns it in others, or cannot add what it kept."""
    pipe, path, dtype = scheduled(SCHEDULERS[name](), torch.bfloat16), tmp_path / "p.safetensors", torch.bfloat16
    stock = pipe(**in_dtype(call_arguments("pixart", STEPS), dtype)).images
    with patch(pipe) as handle:
        handle.calibrate([in_dtype(call, dtype) for call in calls("pixart")], planned=path)  # type: ignore[attr-defined]
    for budget in (0.5, 0.2):
        with patch(pipe, cache=Planned(profile=str(path), budget=budget)) as handle:
            result = pipe(**in_dtype(call_arguments("pixart", STEPS), dtype)).images
            assert handle.report().features[0]["hits"] > 0
        assert result.dtype == stock.dtype and torch.isfinite(result).all()


def test_a_latent_that_a_callback_wrote_into_is_taken(flux: Path) -> None:
    """In bfloat16 too, where the exact one is kept beside it."""
    found = []
    for in_place in (True, False):

        def change(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            latents = tensors["latents"]
            return {"latents": latents if step != 5 else latents.mul_(0.5) if in_place else latents * 0.5}  # noqa: B023

        pipe = build("flux").to(torch.bfloat16)
        given = in_dtype(call_arguments("flux", STEPS, callback_on_step_end=change), torch.bfloat16)
        with patch(pipe, cache=Planned(profile=str(flux), budget=0.3)):
            found.append(pipe(**given).images)
    assert torch.equal(*found)


def test_two_stages_are_not_compared_with_their_mean(tmp_path: Path) -> None:
    """Calibration averages them, so what one of them misses says nothing, and the guard cannot stand on it."""
    path, heun = tmp_path / "p.safetensors", diffusers.HeunDiscreteScheduler
    with patch(scheduled(heun(), torch.float32)) as handle:
        handle.calibrate(calls("pixart"), planned=path)  # type: ignore[attr-defined]
    params, pipe = Planned(profile=str(path), budget=0.5), scheduled(heun(), torch.float32)
    with patch(pipe, cache=params) as handle:
        pipe(**call_arguments("pixart", STEPS))
        assert handle.report().features[0]["hits"] > 0
        assert not [note for note in handle.report().notes if "does not fit" in note]
    with pytest.raises(RefusedError, match="guard=2 compares one prediction a step, and HeunDiscreteScheduler"):
        patch(pipe, cache=replace(params, guard=2))
