"""The guard of the planned cache, and pipelines that are not like the usual ones: UNets, two experts, calls that change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from caches import STEPS, Log, ready
from planned import PROMPTS, calibrated
from probes import difference
from tiny import build, noise, run
from variants import unet_pipeline, wan_two_experts

from chitu_diffusion import Planned, patch
from chitu_diffusion.flexcache import Profile
from chitu_hooks import RefusedError

pytestmark = pytest.mark.filterwarnings("ignore::chitu_hooks.ChituWarning")


# -- the guard ----------------------------------------------------------------------------------------------------------


def shaken(pipe: Any) -> Any:
    """Other weights in a model of the same name, as a LoRA makes them: predictions change otherwise."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in pipe.transformer.parameters():
            parameter.add_(2.0 * parameter.std() * torch.randn_like(parameter) if parameter.numel() > 1 else 0)
    return pipe


def test_predictions_that_change_otherwise_are_told(profiles: dict[str, str]) -> None:
    for pipe, fits in ((build("flux"), True), (shaken(build("flux")), False)):
        with patch(pipe, cache=Planned(profile=profiles["flux"], budget=0.5)) as handle:
            run("flux", pipe, STEPS)
            told = [note for note in handle.report().notes if "does not fit these weights" in note]
            assert bool(told) != fits, handle.report()


@pytest.mark.parametrize("guard", [1, 2])
def test_the_guard_keeps_to_its_room_and_repeats_itself(guard: int, profiles: dict[str, str]) -> None:
    pipe, log = shaken(build("flux")), Log()
    with patch(pipe, cache=Planned(profile=profiles["flux"], budget=0.3, guard=guard), features=(log,)) as handle:
        first = run("flux", pipe, STEPS)
        computed, log.calls = log.computed(), []
        plan = next(f for f in handle.report().features if f["name"] == "planned")["plan"]
        assert torch.equal(run("flux", pipe, STEPS), first) and log.computed() == computed
    assert computed == plan["computes"] and plan["changes"]
    assert len(computed) != 3 and abs(len(computed) - 3) <= guard == len(plan["changes"])


@pytest.mark.parametrize(("longest", "computes"), [(None, 4), (1, 6)])
def test_the_guard_leaves_out_a_step_where_predictions_hardly_change(
    longest: int | None, computes: int, profiles: dict[str, str]
) -> None:
    pipe, log = build("flux"), Log()
    stock = pipe.transformer.forward
    first: list[Any] = []

    def forward(*args: Any, **kwargs: Any) -> Any:
        """The same prediction for ever, but for a little."""
        if len(first) < 2:
            first.append(stock(*args, **kwargs)[0])
        return (first[0] * (1 + 1e-4 * torch.rand(1, generator=noise(len(log.calls)))),)

    pipe.transformer.forward = forward
    params = Planned(profile=profiles["flux"], budget=0.6, guard=2, max_consecutive=longest)
    with patch(pipe, cache=params, features=(log,)) as handle:
        run("flux", pipe, STEPS)
        plan = next(f for f in handle.report().features if f["name"] == "planned")["plan"]
    assert len(log.computed()) == computes and all("left out" in move for move in plan["changes"])


def test_a_profile_of_predictions_that_do_not_change_foretells_from_other_budgets(profiles: dict[str, str]) -> None:
    profile = Profile.load(profiles["flux"])
    same = replace(profile, checks=(replace(profile.checks[0], predicted=0.0), *profile.checks[1:]))
    assert same.psnr(0.01) is not None and 0 < same.error(0.01) < 1


# -- other pipelines ----------------------------------------------------------------------------------------------------


def test_a_unet_has_no_blocks_to_skip_and_a_plan_all_the_same(tmp_path: Path) -> None:
    unet, path = unet_pipeline(), tmp_path / "unet.safetensors"

    def arguments(seed: int) -> dict[str, Any]:
        texts = {
            name: torch.randn(1, 6, 32, generator=noise(seed)) for name in ("prompt_embeds", "negative_prompt_embeds")
        }
        return {**texts, "height": 16, "width": 16, "num_inference_steps": STEPS, "generator": noise(seed)}

    stock = unet.pipe(**arguments(9), output_type="latent").images
    with patch(unet.pipe) as handle:
        found = handle.calibrate([arguments(seed) for seed in range(PROMPTS)], planned=path)["planned"]
    assert found["checks"][0]["psnr"], "Pillow pictures are compared too"
    with patch(unet.pipe, cache=Planned(profile=str(path), budget=0.5)) as handle:
        assert 0 < difference(unet.pipe(**arguments(9), output_type="latent").images, stock) < 0.1
        assert handle.report().features[0]["hits"] == 5
        with pytest.raises(RefusedError, match=r"DDIMScheduler with eta=0\.5 adds fresh noise at every step"):
            unet.pipe(**arguments(9), eta=0.5)
    with patch(unet.pipe) as handle, pytest.raises(RefusedError, match=r"DDIMScheduler with eta=0\.5"):
        handle.calibrate([arguments(seed) for seed in range(PROMPTS)], planned=path, eta=0.5)


def test_the_second_expert_is_planned_for() -> None:
    """A plan goes over both; where it skips the second expert's first position, that is skipped."""
    variant, log = wan_two_experts(), Log()
    params = replace(ready(variant.pipe, Planned(budget=0.2, stretch=True)))
    with patch(variant.pipe, cache=params, features=(log,)) as handle:
        variant.call()
        plan = next(f for f in handle.report().features if f["name"] == "planned")["plan"]
    assert sorted({position for _, position, _, skipped in log.calls if not skipped}) == plan["computes"]
    assert len(plan["computes"]) == int(0.2 * plan["of"])


def test_a_skip_that_cannot_be_is_planned_around(profiles: dict[str, str], tmp_path: Path) -> None:
    """Guidance that a callback switches off makes calls of another shape: the next one is computed, and forecasts go on from it."""
    pipe, log, path = build("sd3"), Log(), tmp_path / "sd3.safetensors"
    calibrated("sd3", path)

    def unguided(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step == 4:
            pipe._guidance_scale = 0.0
            return {name: tensor.chunk(2)[1] for name, tensor in tensors.items()}
        return {}

    names = ["prompt_embeds", "pooled_prompt_embeds"]
    call = {"callback_on_step_end": unguided, "callback_on_step_end_tensor_inputs": names}
    with patch(pipe, cache=Planned(profile=str(path), budget=0.3), features=(log,)) as handle:
        run("sd3", pipe, STEPS, **call)
        report = handle.report()
        course: Any = next(f for f in handle.features if f.name == "planned").course  # type: ignore[attr-defined]
    assert 5 not in course.planned.steps and 5 in log.computed()
    assert (
        log.computed() == sorted(course.computed) and set(course.plan.weights) >= set(range(6, STEPS)) - course.computed
    )
    told = next(feature for feature in report.features if feature["name"] == "planned")["plan"]
    assert told["changes"] == ["computed step 5, which could not be skipped"]
