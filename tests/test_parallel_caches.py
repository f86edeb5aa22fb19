"""Every cache under every kind of parallelism: what it gives on one process, the same hits on every rank, and no hang."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from caches import ACTS, STEPS, Log, fitting
from probes import difference
from ranks import on_ranks
from tiny import build, run

from chitu_diffusion import FBCache, Parallel, patch
from chitu_hooks import ChituWarning

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

NAMES = ("flux", "sd3", "wan")
MODES = ({"ulysses": 2}, {"gather": 2}, {"cfg": 2})
THRESHOLDS = tuple(round(0.05 * number, 2) for number in range(1, 13))


def work(rank: int) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for name in NAMES:
        pipe = build(name, 3)
        full = run(name, pipe, STEPS, length=7)
        for key, params in ACTS.items():
            params = fitting(name, params, 3)
            with patch(pipe, cache=params):
                alone = run(name, pipe, STEPS, length=7)
            for mode in MODES:
                log = Log()
                with patch(pipe, cache=params, parallel=Parallel(**mode), features=(log,)):
                    got = run(name, pipe, STEPS, length=7)
                found[name, key, str(mode)] = difference(got, alone), difference(full, alone), log.hits
    pipe = build("flux", 3)
    for threshold in THRESHOLDS:
        here, there = Log(), Log()
        with patch(pipe, cache=FBCache(threshold=threshold), features=(here,)):
            alone = run("flux", pipe, STEPS)
        with patch(pipe, cache=FBCache(threshold=threshold), parallel=Parallel(gather=2), features=(there,)):
            got = run("flux", pipe, STEPS)
        found[threshold] = difference(got, alone), here.hits, there.hits
    found["idle"] = idle()
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


@pytest.fixture(scope="module")
def found() -> list[dict[Any, Any]]:
    return on_ranks(work, 2, timeout=60)


@pytest.mark.parametrize("mode", [str(mode) for mode in MODES])
@pytest.mark.parametrize("key", ACTS)
@pytest.mark.parametrize("name", NAMES)
def test_a_cache_gives_what_it_gives_alone(found: list[dict[Any, Any]], name: str, key: str, mode: str) -> None:
    for rank in found:
        far, effect, hits = rank[name, key, mode]
        assert hits > 0 and effect > 1e-3, "the cache acted"
        assert far < 1e-5
    assert found[0][name, key, mode][2] == found[1][name, key, mode][2] or "cfg" in mode


def test_ranks_decide_alike_at_every_threshold(found: list[dict[Any, Any]]) -> None:
    for rank in found:
        for threshold in THRESHOLDS:
            far, alone, together = rank[threshold]
            assert far < 1e-5 and alone == together
    hits = {found[0][threshold][1] for threshold in THRESHOLDS}
    assert len(hits) > 3, "the thresholds matter"


def test_calls_of_another_rank_are_no_hits_and_save_nothing(found: list[dict[Any, Any]]) -> None:
    for place, rank in enumerate(found):
        books, branches, told = rank["idle"]
        assert sorted(calls.get("elsewhere", 0) for calls in branches.values()) == [0, 7], "the calls were divided"
        assert (books["hits"], books["computed"], books["flops"]["saved"]) == (0, 9, 0)
        assert books["flops"]["full"] == books["flops"]["spent"] > 0
        assert len(told) == 1 and "nothing was skipped in 9 calls" in told[0], place
