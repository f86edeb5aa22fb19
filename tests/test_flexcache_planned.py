"""The planned cache: what calibration measures, what a profile is good for, and that the plan is what runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from caches import STEPS, Log
from planned import PROMPTS, calls
from probes import difference
from tiny import build, call_arguments, noise, run

from chitu_diffusion import Planned, Static, patch
from chitu_diffusion.flexcache import Profile
from chitu_hooks import PatchError, RefusedError
from chitu_hooks.clock import instance_wrapper

pytestmark = pytest.mark.filterwarnings("ignore::chitu_hooks.ChituWarning")


def taken(pipe: Any, call: Callable[[], Any], given: dict[int, Any] | None = None) -> tuple[Any, list[torch.Tensor]]:
    """What `call` returns and the predictions that its scheduler took; `given` stands in for them, from all before."""
    seen: list[torch.Tensor] = []

    def step(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        output, *rest = args
        seen.append(output.clone())
        pairs = (given or {}).get(len(seen) - 1)
        output = output if pairs is None else sum(weight * seen[at].double() for at, weight in pairs).float()
        return wrapped(output, *rest, **kwargs)

    with instance_wrapper(pipe.scheduler, "step", step):
        return call(), seen


# -- calibration --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["flux", "wan", "pixart"])
def test_a_profile_holds_the_products_of_the_guided_predictions(name: str, profiles: dict[str, str]) -> None:
    pipe, profile = build(name), Profile.load(profiles[name])
    for number, arguments in enumerate(calls(name)):
        _, seen = taken(pipe, lambda: pipe(**arguments))  # noqa: B023
        rows = torch.stack(seen).flatten(1).double()
        assert np.allclose(profile.tables.gram[number], rows @ rows.T / rows.shape[1], rtol=1e-6, atol=0)
    assert profile.key.grid.steps == STEPS and profile.key.size == tuple(seen[0].shape[1:])
    assert Path(profiles[name]).stat().st_size < 50_000


def test_calibrating_changes_nothing_and_measures_constants_only_when_asked(tmp_path: Path) -> None:
    pipe = build("wan")
    stock = run("wan", pipe, STEPS)
    with patch(pipe) as handle:
        found = handle.calibrate(calls("wan"), planned=tmp_path / "p.safetensors")
        assert "magcache" not in found and found["planned"]["samples"] == PROMPTS
        both = handle.calibrate(calls("wan"), tmp_path / "c.yaml", tmp_path / "q.safetensors")
        assert both["magcache"]["steps"] == STEPS and (tmp_path / "c.yaml").is_file()
        assert torch.equal(run("wan", pipe, STEPS), stock)
    one, two = (Profile.load(tmp_path / f"{name}.safetensors") for name in "pq")
    assert np.array_equal(one.tables.gram, two.tables.gram)


def test_what_was_tried_was_tried_on_other_prompts(profiles: dict[str, str]) -> None:
    """A check is what a plan made without that prompt gives for it."""
    profile = Profile.load(profiles["flux"])
    assert [check.computed for check in profile.checks] == [5, 3, 2]
    pipe, arguments = build("flux"), calls("flux")[1]
    full = pipe(**arguments).images
    from chitu_diffusion.flexcache.strategy.planned import PlannedStrategy

    rest = profile.without(slice(1, 2))
    assert len(rest.tables.gram) == PROMPTS - 1
    with patch(pipe, features=(PlannedStrategy(Planned(budget=0.5), rest),)):
        picture = pipe(**calls("flux")[1]).images
    found = -10 * np.log10(np.mean((picture.astype(float) - full) ** 2))
    assert profile.checks[0].psnr[1] == pytest.approx(found, abs=0.01)


def test_calls_without_generators_are_repeated_with_the_same_noise(tmp_path: Path) -> None:
    prompts = [{k: v for k, v in call.items() if k != "generator"} for call in calls("flux")]
    with patch(build("flux")) as handle:
        found = handle.calibrate(prompts, planned=tmp_path / "p.safetensors")["planned"]
    assert found["checks"][0]["error"] < 0.2, "other noise would give another picture"


# -- the plan is what runs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [0.5, 0.3, 0.2])
@pytest.mark.parametrize("name", ["flux", "wan", "pixart"])
def test_the_scheduler_gets_what_the_plan_says(name: str, budget: float, profiles: dict[str, str]) -> None:
    """Around the stock pipeline: every step is computed, and the scheduler is handed the sums of the plan's weights."""
    pipe, log = build(name), Log()
    with patch(pipe, cache=Planned(profile=profiles[name], budget=budget), features=(log,)) as handle:
        result = run(name, pipe, STEPS)
        course: Any = next(f for f in handle.features if f.name == "planned").course  # type: ignore[attr-defined]
        told = next(f for f in handle.report().features if f["name"] == "planned")
    assert (
        log.computed() == list(course.plan.steps) == told["plan"]["computes"] and len(log.computed()) == budget * STEPS
    )
    assert told["plan"]["expected error"] > course.plan.predicted / 2
    assert told["flops"]["spent"] == pytest.approx(budget * told["flops"]["full"])
    expected, _ = taken(pipe, lambda: run(name, pipe, STEPS), course.plan.weights)
    assert difference(result, expected) < 2e-6
    assert difference(expected, run(name, pipe, STEPS)) > 1e-4


def test_a_budget_of_all_steps_is_the_stock_pipeline(profiles: dict[str, str]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        pipe = build("flux").to(dtype)
        stock = in_dtype(pipe, dtype)
        for params in (
            Planned(profile=profiles["flux"], budget=1),
            Planned(profile=profiles["flux"], speedup=1, guard=2),
        ):
            with patch(pipe, cache=params) as handle:
                assert torch.equal(in_dtype(pipe, dtype), stock)
            assert handle.report().features[0]["hits"] == 0


def in_dtype(pipe: Any, dtype: torch.dtype, steps: int = STEPS) -> torch.Tensor:
    kwargs = call_arguments("flux", steps)
    kwargs = {k: v.to(dtype) if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
    return pipe(**kwargs).images


def test_the_latent_is_kept_in_float32_inside_a_gap(profiles: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 the pipeline gets its dtype back, and rounding at each sub-step does not add up."""
    pipe = build("flux").to(torch.bfloat16)
    params, errors = Planned(profile=profiles["flux"], budget=0.1), []
    for rounds in (False, True):
        if rounds:
            monkeypatch.setattr("chitu_diffusion.flexcache.latent.leave", _round_only)
        with patch(pipe, cache=params) as handle:
            result, seen = taken(pipe, lambda: in_dtype(pipe, torch.bfloat16))
            weights = handle.features[0].course.plan.weights  # type: ignore[attr-defined]
        assert result.dtype == torch.bfloat16 and len(weights) == STEPS - 1
        sigmas = pipe.scheduler.sigmas.double()
        start = in_dtype_start(pipe)
        exact = start + sum((sigmas[i + 1] - sigmas[i]) * seen[0].double() for i in range(STEPS))
        errors.append(difference(result, exact))
    assert errors[0] < errors[1] and errors[0] < 2**-8


def _round_only(step: Any, state: Any) -> None:
    if state.dtype is not None:
        step.next_sample = step.next_sample.to(state.dtype)


def in_dtype_start(pipe: Any) -> torch.Tensor:
    seen: list[torch.Tensor] = []
    hook = pipe.transformer.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["hidden_states"].clone()), with_kwargs=True
    )
    in_dtype(pipe, torch.bfloat16, STEPS)
    hook.remove()
    return seen[0].double()


def test_fewer_steps_are_worse_and_a_psnr_is_aimed_at(profiles: dict[str, str]) -> None:
    pipe, stock, found = build("flux"), None, []
    stock = run("flux", pipe, STEPS)
    for budget in (0.7, 0.5, 0.3, 0.1):
        with patch(pipe, cache=Planned(profile=profiles["flux"], budget=budget)):
            found.append(difference(run("flux", pipe, STEPS), stock))
    assert found == sorted(found)
    counts = []
    for aim in (20, 40, 55):
        with patch(pipe, cache=Planned(profile=profiles["flux"], psnr=aim)) as handle:
            run("flux", pipe, STEPS)
            plan = handle.report().features[0]["plan"]
            assert plan["expected psnr"] >= aim
            counts.append(len(plan["computes"]))
    assert counts == sorted(counts) and counts[0] < counts[-1] < STEPS


@pytest.mark.parametrize(
    "limits", [{"warmup": 3}, {"cooldown": 2}, {"max_consecutive": 1}, {"warmup": 2, "cooldown": 1}]
)
def test_limits_are_planned_for(limits: dict[str, int], profiles: dict[str, str]) -> None:
    pipe, log = build("flux"), Log()
    with patch(pipe, cache=Planned(profile=profiles["flux"], budget=0.5, **limits), features=(log,)):
        run("flux", pipe, STEPS)
    computed = log.computed()
    assert len(computed) == 5
    assert set(range(limits.get("warmup", 1))) <= set(computed)
    assert set(range(STEPS - limits.get("cooldown", 0), STEPS)) <= set(computed)
    gaps = np.diff([*computed, STEPS]) - 1
    assert max(gaps) <= limits.get("max_consecutive", STEPS)


def test_limits_that_ask_for_more_steps_than_the_budget_get_them(profiles: dict[str, str]) -> None:
    pipe, log = build("flux"), Log()
    with patch(pipe, cache=Planned(profile=profiles["flux"], budget=0.2, warmup=4), features=(log,)):
        run("flux", pipe, STEPS)
    assert log.computed()[:4] == [0, 1, 2, 3] and len(log.computed()) == 4


# -- what a profile is good for -----------------------------------------------------------------------------------------


def image_to_image() -> dict[str, Any]:
    """The guidance scale is the default of text to image, which this pipeline's is not."""
    return {"image": torch.rand(1, 3, 16, 16, generator=noise(3)), "strength": 0.7, "guidance_scale": 3.5}


def test_image_to_image_takes_the_end_of_the_profile(profiles: dict[str, str]) -> None:
    pipe, log, whole = build("flux", cls=diffusers.FluxImg2ImgPipeline), Log(), Profile.load(profiles["flux"])
    assert whole.key.grid.steps == STEPS
    with patch(pipe, cache=Planned(profile=profiles["flux"], speedup=2), features=(log,)) as handle:
        run("flux", pipe, STEPS, **image_to_image())
        course: Any = handle.features[-1].course  # type: ignore[attr-defined]
        report = handle.report()
    assert course.steps == 7 and np.array_equal(course.tables.gram, whole.tables.gram[:, 3:, 3:])
    assert log.computed() == list(course.plan.steps) and len(log.computed()) == 3
    assert not [note for note in report.notes if note.startswith("planned")]


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "steps": ({"steps": 14}, "the profile is of 10 steps and the run has 14"),
    "sigmas": (
        {"sigmas": [1 - i / 20 for i in range(STEPS)]},
        "the run's 10 steps have other sigmas than the profile's 10",
    ),
    "size": ({"height": 24, "width": 16}, "the profile is of latents 64×4 and the run's are 96×4"),
    "guidance": (
        {"true_cfg_scale": 2.0},
        "the profile is of true_cfg_scale 3 and guidance_scale 3.5, 2 calls a step and the run",
    ),
    "no guidance": ({"guided": False}, "the run has true_cfg_scale 1 and guidance_scale 3.5"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_runs_are_refused_or_stretched_to(change: str, profiles: dict[str, str]) -> None:
    over, message = CHANGES[change]
    steps = over.get("steps", STEPS)
    over = {key: value for key, value in over.items() if key != "steps"}
    pipe = build("flux")
    with patch(pipe, cache=Planned(profile=profiles["flux"], budget=0.5)) as handle:
        with pytest.raises(RefusedError, match=f"planned: .*{message}.*stretch=True"):
            run("flux", pipe, steps, **over)
        run("flux", pipe, STEPS)  # the profile's own kind of run goes on working
    with patch(pipe, cache=Planned(profile=profiles["flux"], budget=0.5, stretch=True)) as handle:
        run("flux", pipe, steps, **over)
        report = handle.report()
    assert report.features[0]["hits"] > 0
    assert any(message in note for note in report.notes)


def test_a_stretched_profile_lies_between_the_positions(profiles: dict[str, str]) -> None:
    """At twice the steps every second position is one of the profile's, and the others are means of two."""
    profile = Profile.load(profiles["flux"])
    grid = profile.key.grid
    middles = [(a + b) / 2 for a, b in zip(grid.sigmas, grid.sigmas[1:])]
    finer = replace(grid, sigmas=(*(s for pair in zip(grid.sigmas, middles) for s in pair), grid.sigmas[-1]))
    tables, own = profile.fitted(finer), profile.tables
    assert tables.steps == 2 * STEPS and np.allclose(tables.gram[:, ::2, ::2], own.gram)
    assert np.allclose(tables.gram[:, 1, 0], (own.gram[:, 0, 0] + own.gram[:, 1, 0]) / 2)


def test_other_models_schedulers_and_broken_files_are_told(profiles: dict[str, str], tmp_path: Path) -> None:
    flux = Planned(profile=profiles["flux"], budget=0.5)
    with pytest.raises(RefusedError, match=r"measured on .* of 2\+3 blocks, and this is .* of 4\+5"):
        patch(build("flux", 4), cache=flux)
    with pytest.raises(
        RefusedError, match="there is no profile of this model; measure one with chitu calibrate --planned"
    ):
        patch(build("flux"), cache=Planned(budget=0.5))
    heun = build("flux")
    heun.scheduler = diffusers.FlowMatchHeunDiscreteScheduler()
    with pytest.raises(
        RefusedError, match=r"with FlowMatchEulerDiscreteScheduler, .* and this is FlowMatchHeunDiscreteScheduler"
    ):
        patch(heun, cache=flux)
    noisy = build("flux")
    with patch(noisy, cache=flux):
        noisy.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(stochastic_sampling=True)
        with pytest.raises(RefusedError, match="adds fresh noise at every step"):
            run("flux", noisy, STEPS)
    whole = Path(profiles["flux"]).read_bytes()
    for text in (whole[: len(whole) // 2], b"not at all", b""):
        (tmp_path / "broken.safetensors").write_bytes(text)
        with pytest.raises(PatchError, match="is truncated or no profile"):
            patch(build("flux"), cache=replace(flux, profile=str(tmp_path / "broken.safetensors")))
    with pytest.raises(PatchError, match=r"no profile .*nearest: broken\.safetensors"):
        patch(build("flux"), cache=replace(flux, profile=str(tmp_path / "brokn.safetensors")))


def test_a_psnr_that_cannot_be_reached_is_told(profiles: dict[str, str]) -> None:
    with pytest.raises(
        RefusedError, match=r"psnr=99 leaves no step to skip: 9 of 10 computed can be expected to give [\d.]+ dB"
    ):
        patch(build("flux"), cache=Planned(profile=profiles["flux"], psnr=99))
    with pytest.raises(RefusedError, match="what psnr=30 takes is not known, since the calibration returned latents"):
        patch(build("flux"), cache=Planned(profile=profiles["flux latents"], psnr=30))


def test_a_calibration_that_says_nothing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.safetensors"
    with patch(build("flux")) as handle:
        with pytest.raises(PatchError, match=r"3 prompts are too few .* at least 4"):
            handle.calibrate(calls("flux")[:3], planned=path)
        mixed = [*calls("flux")[:3], *calls("flux", STEPS + 1)]
        with pytest.raises(PatchError, match="calls of a calibration are to be alike, and the profile is of 10 steps"):
            handle.calibrate(mixed, planned=path)
    with patch(build("flux"), cache=Static(steps=(0,))) as handle:
        with pytest.raises(PatchError, match="static is on"):
            handle.calibrate(calls("flux"), planned=path)
    noisy = build("flux")
    noisy.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(stochastic_sampling=True)
    with patch(noisy) as handle, pytest.raises(RefusedError, match="adds fresh noise"):
        handle.calibrate(calls("flux"), planned=path)
    assert not path.exists()
