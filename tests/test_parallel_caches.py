"""Every cache under every kind of parallelism: what it gives on one process, the same hits on every rank, and no hang."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from caches import ACTS, STEPS, Log, fitting, ready
from diffusers import Lumina2Pipeline
from probes import difference
from ranks import divided, on_ranks
from tiny import build, run

from chitu_diffusion import EasyCache, FBCache, MeanCache, Parallel, patch
from chitu_hooks import ChituWarning

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

MODES = {
    "flux": ({"ulysses": 2}, {"gather": 2}, {"cfg": 2}),
    "sd3": ({"ulysses": 2}, {"cfg": 2}),
    "wan": ({"gather": 2}, {"cfg": 2}),
}
WHOLE = {key: params for key, params in ACTS.items() if params.strategy != "cubic"}
"""Caches that leave no tokens out; the others refuse ranks."""
CASES = [(name, key, str(mode)) for name, modes in MODES.items() for key in WHOLE for mode in modes]
THRESHOLDS = tuple(round(0.075 * number, 3) for number in range(1, 9))

SWEEPS = [("flux", {"gather": 2}, FBCache), ("sd3", {"cfg": 2}, FBCache), ("sd3", {"cfg": 2}, EasyCache)]


def work(rank: int) -> dict[Any, Any]:
    pipes = {name: build(name, 3) for name in MODES}
    alone = divided(
        {(name, key): functools.partial(cached, name, pipes[name], key) for name in MODES for key in (None, *WHOLE)}
    )
    found: dict[Any, Any] = {}
    for name, modes in MODES.items():
        full, _, _ = alone[name, None]
        for key in WHOLE:
            expected, found[name, key, "flops"], _ = alone[name, key]
            for mode in modes:
                got, found[name, key, str(mode), "flops"], hits = cached(name, pipes[name], key, Parallel(**mode))
                found[name, key, str(mode)] = difference(got, expected), difference(full, expected), hits
    for name, mode, strategy in SWEEPS:
        found[name, str(mode), strategy] = sweep(name, pipes[name], mode, strategy)
    found["idle"] = idle()
    found |= changing_guidance()
    return found


def cached(name: str, pipe: Any, key: str | None, parallel: Parallel | None = None) -> Any:
    """Latents, FLOPs and hits of one run with the cache `key`."""
    if key is None:
        return run(name, pipe, STEPS, length=7), None, 0
    log = Log()
    with patch(pipe, cache=ready(pipe, fitting(name, WHOLE[key], 3)), parallel=parallel, features=(log,)) as handle:
        return run(name, pipe, STEPS, length=7), flops(handle), log.hits


def flops(handle: Any) -> dict[str, int]:
    return next(feature["flops"] for feature in handle.report().features if "flops" in feature)


def sweep(name: str, pipe: Any, mode: dict[str, int], strategy: type[Any]) -> list[tuple[float, list[int], list[int]]]:
    """For each threshold: how far off the picture is, and the positions that are computed alone and on this rank."""

    def drawn(threshold: float, parallel: Parallel | None = None) -> Any:
        log = Log()
        with patch(pipe, cache=strategy(threshold=threshold), parallel=parallel, features=(log,)):
            return run(name, pipe, STEPS, length=7), log.computed()

    alone = divided({threshold: functools.partial(drawn, threshold) for threshold in THRESHOLDS})
    found = []
    for threshold, (expected, computed) in sorted(alone.items()):
        got, here = drawn(threshold, Parallel(**mode))
        found.append((difference(got, expected), computed, here))
    return found


def idle() -> tuple[Any, ...]:
    """A cache that never skips, where half of the calls are left to the other rank."""
    pipe = build("flux", 3)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", ChituWarning)
        with patch(pipe, cache=FBCache(threshold=1e-9), parallel=Parallel(cfg=2)) as handle:
            run("flux", pipe, 8)
            report = handle.report()
    books = next(feature for feature in report.features if feature["name"] == "fbcache")
    return books, report.branches, [str(one.message) for one in told if "fbcache" in str(one.message)]


class Changing(Lumina2Pipeline):
    """Guidance that changes from step to step: each runs the branches that `steps` has for it, and takes their mean."""

    @torch.no_grad()
    def __call__(self, steps: str) -> torch.Tensor:  # type: ignore[override]
        draw = torch.Generator().manual_seed(0)
        width = self.transformer.config.cap_feat_dim
        texts = {name: torch.randn(1, 7, width, generator=draw) for name in "cun"}
        latents, mask = torch.randn(1, 4, 16, 16, generator=draw), torch.ones(1, 7, dtype=torch.bool)
        self.scheduler.set_timesteps(len(steps.split()))
        for t, branches in zip(self.scheduler.timesteps, steps.split()):
            time = (1 - t / self.scheduler.config.num_train_timesteps).reshape(1)
            found = [self.transformer(latents, time, texts[name], mask, return_dict=False)[0] for name in branches]
            latents = self.scheduler.step(-torch.stack(found).mean(0), t, latents, return_dict=False)[0]
        return latents


WAYS = {
    "all the time": "cu cu cu cu cu cu cu cu cu cu",
    "the last goes": "cu cu cu cu cu c c c c c",
    "the first goes": "cu cu cu cu cu u u u u u",
    "it comes back": "cu cu cu c c c cu cu cu cu",
    "in turn": "cu cu c u c u cu u c cu",
    "another takes its place": "cu cu cu cn cn cn cn cn cu cu",
    "one more for a while": "cu cu cun cun cun c cun cun c u",
}
CHANGING = ("static", "fbcache", "easycache", "meancache", "meancache window", "pab", "taylorseer")
MORE = ACTS | {"meancache window": MeanCache(steps=(0, 1, 2, 3, 6), window=2)}


def changing_guidance() -> dict[Any, Any]:
    pipe, found = Changing(**build("lumina2", 3).components), {}

    def alone(way: str, key: str) -> torch.Tensor:
        with patch(pipe, cache=MORE[key]):
            return pipe(WAYS[way])

    expected = divided({(way, key): functools.partial(alone, way, key) for way in WAYS for key in CHANGING})
    for way, key in expected:
        log = Log()
        with patch(pipe, cache=MORE[key], parallel=Parallel(cfg=2), features=(log,)) as handle:
            got = pipe(WAYS[way])
            left = sum(calls.get("elsewhere", 0) for calls in handle.report().branches.values())
        found[way, key] = difference(got, expected[way, key]), log.hits, left
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[Any, Any]]:
    return on_ranks(work, 2, timeout=60)


@pytest.mark.parametrize(("name", "key", "mode"), CASES)
def test_a_cache_gives_what_it_gives_alone(found: list[dict[Any, Any]], name: str, key: str, mode: str) -> None:
    for rank in found:
        far, effect, hits = rank[name, key, mode]
        assert hits > 0 and effect > 1e-3, "the cache acted"
        assert far < 1e-5
    assert found[0][name, key, mode][2] == found[1][name, key, mode][2] or "cfg" in mode


@pytest.mark.parametrize("key", WHOLE)
@pytest.mark.parametrize("name", MODES)
def test_flops_are_of_whole_calls_and_of_this_ranks_part_of_guidance(
    found: list[dict[Any, Any]], name: str, key: str
) -> None:
    alone = found[0][name, key, "flops"]
    for mode in MODES[name]:
        for rank in found if "cfg" not in mode else ():
            assert rank[name, key, str(mode), "flops"] == alone, "the tokens of all ranks are counted"
    parts = [rank[name, key, str({"cfg": 2}), "flops"] for rank in found]
    # The first step of calls one after the other runs on both ranks.
    twice = 0 if name == "sd3" else alone["full"] // STEPS
    assert sum(part["full"] for part in parts) == alone["full"] + twice
    assert abs(sum(part["saved"] for part in parts) - alone["saved"]) <= 0.01 * alone["saved"]


@pytest.mark.parametrize(("name", "mode", "strategy"), SWEEPS)
def test_ranks_decide_alike_at_every_threshold(
    found: list[dict[Any, Any]], name: str, mode: dict[str, int], strategy: type[Any]
) -> None:
    """Also where each rank has half of the batch: the worst sample of the whole batch decides."""
    for rank in found:
        for far, alone, together in rank[name, str(mode), strategy]:
            assert far < 1e-5 and alone == together
    computed = {tuple(alone) for _, alone, _ in found[0][name, str(mode), strategy]}
    assert len(computed) > 3, "the thresholds matter"


def test_calls_of_another_rank_are_no_hits_and_save_nothing(found: list[dict[Any, Any]]) -> None:
    for place, rank in enumerate(found):
        books, branches, told = rank["idle"]
        assert sorted(calls.get("elsewhere", 0) for calls in branches.values()) == [0, 7], "the calls were divided"
        assert (books["hits"], books["computed"], books["flops"]["saved"]) == (0, 9, 0)
        assert books["flops"]["full"] == books["flops"]["spent"] > 0
        assert len(told) == 1 and "nothing was skipped in 9 calls" in told[0], place


@pytest.mark.parametrize("key", CHANGING)
@pytest.mark.parametrize("way", WAYS)
def test_guidance_that_changes_within_a_run(found: list[dict[Any, Any]], way: str, key: str) -> None:
    """A branch stays where its state is: every rank gets what one process gets, bit for bit."""
    for rank in found:
        far, _, left = rank[way, key]
        assert left > 0, "calls were divided"
        assert far == 0
    assert sum(rank[way, key][1] for rank in found) > 0, "the cache acted"


def test_a_rank_without_a_branch_of_its_own_keeps_up() -> None:
    found = on_ranks(more_ranks_than_branches, 3, timeout=60)
    assert min(rank[2] for rank in found) > 0 and max(rank[2] for rank in found) == 18, "the third rank runs none"
    for far, told, _ in found:
        assert far == 0
        assert not told, "a rank with nothing to skip does not complain"


def more_ranks_than_branches(rank: int) -> tuple[Any, ...]:
    pipe, cache = Changing(**build("lumina2", 3).components), MORE["meancache window"]
    with patch(pipe, cache=cache):
        alone = pipe(WAYS["all the time"])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", ChituWarning)
        with patch(pipe, cache=cache, parallel=Parallel(cfg=3)) as handle:
            got = pipe(WAYS["all the time"])
            left = sum(calls.get("elsewhere", 0) for calls in handle.report().branches.values())
    return difference(got, alone), [str(one.message) for one in told if "meancache" in str(one.message)], left
