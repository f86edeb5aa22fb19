"""How far velocities answer errors of the latent: that calibration measures it, that a profile keeps it and that plans count it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from caches import STEPS
from planned import PROMPTS, calls
from tiny import build

from chitu_diffusion import Planned, patch
from chitu_diffusion.flexcache import Profile
from chitu_diffusion.flexcache.planning import Plan, Tables, drift
from chitu_diffusion.flexcache.planning.combine import response
from chitu_diffusion.flexcache.planning.course import Planner
from chitu_hooks import StepCall
from chitu_hooks.clock import instance_wrapper

pytestmark = pytest.mark.filterwarnings("ignore::chitu_hooks.ChituWarning")

KNOWN, MANY = 6.0, 20


def answering(factor: float) -> Any:
    """A pipeline whose velocity moves `factor` times as far as its latent, and a little more or less by what the model says."""
    pipe = build("flux")

    def answer(module: Any, args: Any, kwargs: dict[str, Any], output: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        return (factor * kwargs["hidden_states"] + 0.05 * output[0],)

    pipe.transformer.register_forward_hook(answer, with_kwargs=True)
    return pipe


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("drift") / "known.safetensors")
    with torch.no_grad(), patch(answering(KNOWN)) as handle:
        handle.calibrate(calls("flux", MANY), planned=path)
    return path


# -- what is measured ---------------------------------------------------------------------------------------------------


def followed(profile: Profile, number: int) -> list[Plan]:
    """The plans in whose runs the responses of call `number` were measured."""
    rest = profile.without(slice(number, number + 1))
    rest = replace(rest, tables=replace(rest.tables, response=None))
    steps = profile.key.grid.steps
    return [
        Planner(Planned(budget=round(part * steps) / steps), rest).course(profile.key).plan for part in (1 / 3, 1 / 5)
    ]


def after_gaps(plan: Plan) -> list[int]:
    """Computed positions before which something was skipped."""
    return [at for number, at in enumerate(plan.steps) if at != number]


def test_the_response_is_that_of_the_model_and_not_of_the_rule(known: str) -> None:
    profile = Profile.load(known)
    rule, own = response(replace(profile.tables, response=None)), np.asarray(profile.tables.response)
    assert own.shape == (PROMPTS, MANY)
    for number in range(PROMPTS):
        places = sorted({at for plan in followed(profile, number) for at in after_gaps(plan)})
        assert len(places) >= 4 and max(abs(np.log(rule[places] / KNOWN))) > 0.5
        assert own[number, places] == pytest.approx(KNOWN, rel=0.03)


class Seen:
    """Latents and predictions of one run of a stock pipeline; sums of predictions in the place of some."""

    def __init__(self, pipe: Any, arguments: dict[str, Any], given: dict[int, Any] | None = None) -> None:
        self.latents: list[torch.Tensor] = []
        self.predictions: list[torch.Tensor] = []
        self.given = given or {}
        with instance_wrapper(pipe.scheduler, "step", self.step):
            pipe(**arguments)

    def step(self, wrapped: Any, instance: Any, args: Sequence[Any], kwargs: Any) -> Any:
        output, timestep, latent = args
        self.latents.append(latent.clone())
        self.predictions.append(output.clone())
        pairs = self.given.get(len(self.predictions) - 1)
        output = output if pairs is None else sum(weight * self.predictions[at] for at, weight in pairs)
        return wrapped(output, timestep, latent, **kwargs)


def test_it_is_what_two_runs_of_the_stock_pipeline_say(profiles: dict[str, str]) -> None:
    """One with every step computed, and one whose scheduler is handed the sums of a plan that was made without this prompt."""
    profile, number = Profile.load(profiles["flux"]), 1
    whole, found = Seen(build("flux"), calls("flux")[number]), dict[int, list[float]]()
    for plan in followed(profile, number):
        run = Seen(build("flux"), calls("flux")[number], dict(plan.weights))
        for at in after_gaps(plan):
            moved, answered = (run.latents[at] - whole.latents[at], run.predictions[at] - whole.predictions[at])
            found.setdefault(at, []).append(float(answered.norm() / moved.norm()))
    assert len(found) >= 2
    own = np.asarray(profile.tables.response)[number]
    for at, values in found.items():
        assert own[at] == pytest.approx(np.exp(np.mean(np.log(values))), rel=1e-3)


def test_pictures_of_a_batch_have_responses_of_their_own(tmp_path: Path) -> None:
    with patch(build("flux")) as handle:
        handle.calibrate(calls("flux", batch=2), planned=tmp_path / "p.safetensors")
    found = np.asarray(Profile.load(tmp_path / "p.safetensors").tables.response)
    assert found.shape == (2 * PROMPTS, STEPS)
    assert len(np.unique(found[:, -1])) == 2 * PROMPTS


def test_it_is_measured_only_where_plans_count_it(profiles: dict[str, str]) -> None:
    assert Profile.load(profiles["pixart"]).tables.response is None, "no Euler steps along a flow"
    assert Profile.load(profiles["flux"]).tables.response is not None


def test_predictions_that_do_not_change_leave_the_rule(tmp_path: Path) -> None:
    pipe = build("flux")
    pipe.transformer.register_forward_hook(lambda module, args, output: (torch.ones_like(output[0]),))
    with patch(pipe) as handle:
        handle.calibrate(calls("flux"), planned=tmp_path / "p.safetensors")
    assert Profile.load(tmp_path / "p.safetensors").tables.response is None


@pytest.mark.parametrize(("dtype", "least"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-8)])
def test_what_moved_no_further_than_rounding_says_nothing(dtype: torch.dtype, least: float) -> None:
    latent, prediction = torch.ones(2, 4, 64, dtype=dtype), torch.ones(2, 4, 64, dtype=dtype)
    off = torch.tensor([0.5 * least, 2.0 * least])[:, None, None]
    step: Any = StepCall(None, None, (prediction.float() + 3 * off, 0, latent.float() + off), {})  # type: ignore[arg-type]
    few, enough = drift.ratios((latent, prediction), step)
    assert np.isnan(few) and enough == pytest.approx(3, rel=0.01)


def test_few_whole_runs_are_held_where_they_are_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "HELD", 1)
    with patch(build("flux")) as handle:
        handle.calibrate(calls("flux"), planned=tmp_path / "p.safetensors")
    assert np.asarray(Profile.load(tmp_path / "p.safetensors").tables.response).shape == (1, STEPS)


def test_between_what_was_measured_it_follows_the_rule() -> None:
    """Twice the rule at one position and eight times at another: four times between them, by the rule's own shape."""
    tables = Tables(np.linspace(1, 0, STEPS + 1), np.eye(STEPS)[None].repeat(2, 0))
    rule = response(tables)
    nothing = (float("nan"),) * 2
    runs = [[(0, nothing), (2, (2 * rule[2], np.nan)), (6, (8 * rule[6], np.nan)), (6, (8 * rule[6], np.nan))]]
    found = np.asarray(drift.responses(tables, runs))
    assert found[0] / rule == pytest.approx([2, 2, 2, 2**1.5, 4, 2**2.5, 8, 8, 8, 8])
    assert np.array_equal(found[1], rule), "of this picture nothing is known"
    assert drift.responses(tables, [[(0, nothing)]]) is None


# -- what becomes of it -------------------------------------------------------------------------------------------------


def test_a_profile_carries_it(known: str, tmp_path: Path) -> None:
    profile = Profile.load(known)
    profile.save(tmp_path / "copy.safetensors")
    own = np.asarray(profile.tables.response)
    assert np.array_equal(own, np.asarray(Profile.load(tmp_path / "copy.safetensors").tables.response))
    assert np.array_equal(np.asarray(profile.without(slice(1, 2)).tables.response), own[[0, 2, 3]])
    assert profile.without(slice(0, PROMPTS - 1)).tables.response is not None
    grid = profile.key.grid
    tail = replace(grid, sigmas=grid.sigmas[3:])
    assert np.array_equal(np.asarray(profile.fitted(tail).response), own[:, 3:])
    middles = [(a + b) / 2 for a, b in zip(grid.sigmas, grid.sigmas[1:])]
    finer = replace(grid, sigmas=(*(s for pair in zip(grid.sigmas, middles) for s in pair), grid.sigmas[-1]))
    stretched = np.asarray(profile.fitted(finer).response)
    assert np.allclose(stretched[:, ::2], own) and np.allclose(stretched[:, 1], (own[:, 0] + own[:, 1]) / 2)


def test_plans_count_it(known: str) -> None:
    profile = Profile.load(known)
    ruled = replace(profile, tables=replace(profile.tables, response=None))
    with patch(answering(KNOWN), cache=Planned(profile=known, budget=0.4)) as handle:
        handle.pipe(**calls("flux", MANY)[0])
        course: Any = handle.features[0].course  # type: ignore[attr-defined]
    own, other = (Planner(Planned(budget=0.4), p).course(profile.key).plan for p in (profile, ruled))
    assert course.plan == own != other
