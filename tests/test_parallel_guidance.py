"""Branches of guidance on different ranks: bit-equal where whole calls are divided, within tolerance where the batch is."""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from typing import Any

import pytest
import torch
import variants
from diffusers import Lumina2Pipeline
from parallel_cases import Outcome, attempt
from probes import difference
from ranks import on_ranks
from tiny import build, run

from chitu_diffusion import MeanCache, Parallel, Static, patch
from chitu_diffusion.adapters import registry
from chitu_hooks import ChituWarning, RefusedError

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

STEPS = 4
SEQUENTIAL = ("flux", "qwen", "wan", "lumina2", "flux2_klein", "cogview4", "chroma", "hunyuan_image")
BATCHED = ("sd3", "pixart", "zimage")
CFG = {"cfg": 2}


def work(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in (*SEQUENTIAL, *BATCHED):
        pipe = build(name)
        expected = run(name, pipe, STEPS)
        found[name] = attempt(pipe, CFG, lambda: run(name, pipe, STEPS), expected)  # noqa: B023
    for name in ("sd3", "zimage"):
        pipe = build(name)
        expected = run(name, pipe, STEPS, batch=3, length=7)
        found[f"{name} three prompts"] = attempt(pipe, CFG, lambda: run(name, pipe, STEPS, batch=3, length=7), expected)  # noqa: B023
    found["truncated"] = switched_off_mid_way()
    found["mixed precision"] = mixed_precision()
    found["skip layers"] = skip_layer_guidance()
    found["off"] = guidance_off()
    found["unknown style"] = unknown_style()
    found["no steps"] = no_steps()
    return found


def switched_off_mid_way() -> Any:
    pipe = build("lumina2")

    def call() -> torch.Tensor:
        return run("lumina2", pipe, 6, cfg_trunc_ratio=0.5)

    return attempt(pipe, CFG, call, call())


def mixed_precision() -> Any:
    """Latents in float32, the model in bfloat16."""
    pipe = build("wan")
    pipe.transformer.to(torch.bfloat16)

    def call() -> torch.Tensor:
        return run("wan", pipe, STEPS)

    return attempt(pipe, CFG, call, call())


def skip_layer_guidance() -> Any:
    """A further call a step for a part of the schedule. The pipeline combines the other branches before it runs that one."""
    variant = variants.skip_layers(1)
    assert variant.plain is not None
    plain = variant.plain
    arguments = dict(skip_guidance_layers=[1], skip_layer_guidance_start=0.0, skip_layer_guidance_stop=0.5)
    expected = plain(**arguments)
    batched = attempt(variant.pipe, CFG, lambda: plain(**arguments), expected)
    hook_map = next(found for found in registry() if found.name == "sd3")
    sequential = dataclasses.replace(hook_map, guidance="sequential")
    with patch(variant.pipe, parallel=Parallel(cfg=2), hook_map=sequential):
        try:
            plain(**arguments)
            message = "nothing was raised"
        except RefusedError as error:
            message = str(error)
    return batched, message, attempt(variant.pipe, CFG, lambda: plain(**arguments), expected)


def unknown_style() -> tuple[Any, ...]:
    """A map that does not say how guidance goes, alone and under a cache that met the whole batch at the first step."""
    pipe = build("sd3")
    hook_map = dataclasses.replace(next(found for found in registry() if found.name == "sd3"), guidance="unknown")
    found: list[Any] = []
    for cache in (None, Static(steps=(0, 3)), MeanCache(steps=(0, 3))):
        with patch(pipe, cache=cache, hook_map=hook_map):
            alone = run("sd3", pipe, STEPS)
        with patch(pipe, cache=cache, hook_map=hook_map, parallel=Parallel(cfg=2)) as handle:
            got = run("sd3", pipe, STEPS)
            report = handle.report()
        books = {feature["name"]: feature for feature in report.features}
        found.append(
            (books["cfg parallel"]["calls split"], difference(got, alone), next(iter(report.branches.values())))
        )
    return tuple(found)


class Unstepped(Lumina2Pipeline):
    """Integrates by itself, without ``scheduler.step``. Returns how many predictions are still held at the end."""

    @torch.no_grad()
    def __call__(self) -> int:  # type: ignore[override]
        texts = [torch.full((1, 7, self.transformer.config.cap_feat_dim), value) for value in (0.1, 0.2)]
        latents, mask, made = torch.ones(1, 4, 16, 16), torch.ones(1, 7, dtype=torch.bool), []
        for number in range(STEPS):
            time = torch.tensor([number / STEPS])
            found = [self.transformer(latents, time, text, mask, return_dict=False)[0] for text in texts]
            latents = latents + torch.stack(found).mean(0) / STEPS
            made += [weakref.ref(one) for one in found]
            del found
        return sum(one() is not None for one in made)


def no_steps() -> tuple[int, list[str]]:
    pipe = Unstepped(**build("lumina2").components)
    with warnings.catch_warnings(record=True) as told, patch(pipe, parallel=Parallel(cfg=2)):
        warnings.simplefilter("always", ChituWarning)
        held = pipe()
    return held, [str(one.message) for one in told if "cfg parallel" in str(one.message)]


def guidance_off() -> Any:
    pipe = build("flux")
    expected = run("flux", pipe, STEPS, guided=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcome = attempt(pipe, CFG, lambda: run("flux", pipe, STEPS, guided=False), expected)
    return outcome, [str(w.message) for w in caught if "nothing was divided" in str(w.message)]


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return on_ranks(work, 2, timeout=60)


def feature(outcome: Any) -> dict[str, Any]:
    assert isinstance(outcome, Outcome), outcome
    return outcome.features["cfg parallel"]


@pytest.mark.parametrize("name", SEQUENTIAL)
def test_divided_calls_give_the_same_bits(found: list[dict[str, Any]], name: str) -> None:
    for rank in found:
        assert feature(rank[name])["calls left to other ranks"] >= STEPS - 1
        assert rank[name].difference == 0


@pytest.mark.parametrize("name", [*BATCHED, "sd3 three prompts", "zimage three prompts"])
def test_a_divided_batch_is_close(found: list[dict[str, Any]], name: str) -> None:
    for rank in found:
        assert feature(rank[name])["calls split"] == STEPS
        assert rank[name].difference < 1e-5


def test_guidance_that_ends_mid_way(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert feature(rank["truncated"])["calls left to other ranks"] > 0
        assert rank["truncated"].difference == 0


def test_latents_in_another_precision_than_the_model(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert feature(rank["mixed precision"])["calls left to other ranks"] == STEPS - 1
        assert rank["mixed precision"].difference == 0


def test_a_further_branch_beside_a_divided_batch(found: list[dict[str, Any]]) -> None:
    for rank in found:
        outcome = rank["skip layers"][0]
        assert feature(outcome)["calls split"] == variants.STEPS
        assert outcome.difference < 1e-5


def test_guidance_that_is_off_is_told(found: list[dict[str, Any]]) -> None:
    for rank in found:
        outcome, told = rank["off"]
        assert outcome.difference == 0 and feature(outcome)["calls left to other ranks"] == 0
        assert len(told) == 1


def test_a_pipeline_that_reads_a_branch_early_is_refused_on_every_rank(found: list[dict[str, Any]]) -> None:
    for rank in found:
        _, message, afterwards = rank["skip layers"]
        assert "StableDiffusion3Pipeline reads one branch before it runs the next" in message
        assert afterwards.difference < 1e-5, "the next call works"


def test_a_batch_is_divided_at_every_step_once_guidance_is_known(found: list[dict[str, Any]]) -> None:
    for rank in found:
        (split, far, _), *cached = rank["unknown style"]
        assert split == STEPS - 1 and far < 1e-5
        for split, _, calls in cached:
            assert split == STEPS - 1
            assert calls["computed"] == 3, "what was kept of the whole batch is not given to a part of it"
            assert calls["skipped"] + calls["replaced"] == 1


def test_a_pipeline_without_steps_is_told_and_piles_up_nothing(found: list[dict[str, Any]]) -> None:
    for rank in found:
        held, told = rank["no steps"]
        assert held == 0
        assert len(told) == 1 and "took no step of its scheduler" in told[0]
