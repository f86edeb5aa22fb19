"""Blocks compile whole with tokens spread over ranks, in either order, and caches skip under every kind of parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parallel_cases import ODD
from probes import difference
from ranks import on_ranks
from tiny import build, run
from torch._dynamo.utils import counters

from chitu_diffusion import Parallel, Static, patch

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

STEPS = 4
COMPILED = [
    ("flux", {"ulysses": 2}, "patch first"),
    ("flux", {"gather": 2}, "compile first"),
    ("qwen", {"ulysses": 2}, "compile first"),
    ("zimage", {"gather": 2}, "patch first"),
    ("flux", {"ring": 2}, "patch first"),
    ("wan", {"ring": 2}, "compile first"),
    ("qwen", {"ulysses": 2, "overlap": 2}, "patch first"),
    ("flux", {"gather": 2, "overlap": 2}, "compile first"),
]
CLASSES = {"flux": 2, "qwen": 1, "wan": 1, "zimage": 1}
CACHED = {
    "flux": [{"ulysses": 2}, {"gather": 2}, {"cfg": 2}],
    "sd3": [{"ulysses": 2}, {"gather": 2}, {"cfg": 2}],
    "zimage": [{"ulysses": 2}],
    "wan": [{"gather": 2}, {"cfg": 2}],
}
KEPT = (0, 1, 4)


def compiled(rank: int) -> list[Any]:
    found = []
    for name, degrees, order in COMPILED:
        torch._dynamo.reset()
        counters.clear()
        pipe, arguments = build(name), {"length": 7, **ODD[name]}
        expected = run(name, pipe, STEPS, **arguments)
        if order == "compile first":
            pipe.transformer.compile_repeated_blocks(fullgraph=True, backend="eager")
        with patch(pipe, parallel=Parallel(**degrees)):
            if order == "patch first":
                pipe.transformer.compile_repeated_blocks(fullgraph=True, backend="eager")
            got = run(name, pipe, STEPS, **arguments)
            graphs = counters["stats"]["unique_graphs"]
            run(name, pipe, 2 * STEPS, **arguments)
            found.append((difference(got, expected), graphs, counters["stats"]["unique_graphs"] - graphs))
    return found


def cached(rank: int) -> dict[str, Any]:
    found = {}
    for name, modes in CACHED.items():
        pipe, arguments = build(name), {"length": 7, **ODD[name]}
        with patch(pipe, cache=Static(steps=KEPT)):
            expected = run(name, pipe, 6, **arguments)
        full = run(name, pipe, 6, **arguments)
        for degrees in modes:
            with patch(pipe, cache=Static(steps=KEPT), parallel=Parallel(**degrees)) as handle:
                got = run(name, pipe, 6, **arguments)
                branches = handle.report().branches
            found[f"{name} {degrees}"] = difference(got, expected), difference(full, expected), branches
    return found


def work(rank: int) -> Any:
    return compiled(rank), cached(rank)


@pytest.fixture(scope="module")
def found() -> list[Any]:
    return on_ranks(work, 2, timeout=120)


@pytest.mark.parametrize("number", range(len(COMPILED)), ids=lambda number: " ".join(map(str, COMPILED[number])))
def test_blocks_compile_whole(found: list[Any], number: int) -> None:
    for rank, _ in found:
        far, graphs, later = rank[number]
        assert far < 1e-5
        # Two for a class of blocks, since the branches of guidance differ in length, and what the refiners need.
        assert 0 < graphs <= 2 * CLASSES[COMPILED[number][0]] + 3
        assert later == 0, "no step adds a graph"


@pytest.mark.parametrize("name", [f"{name} {degrees}" for name, modes in CACHED.items() for degrees in modes])
def test_a_cache_skips_the_same_steps_on_every_rank(found: list[Any], name: str) -> None:
    for _, rank in found:
        far, effect, branches = rank[name]
        assert effect > 1e-3, "the cache shows in the picture"
        assert far < 1e-5, "and parallelism does not"
        assert any(calls["skipped"] for calls in branches.values())
