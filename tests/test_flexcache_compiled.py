"""Contract 9 for every strategy: compiled blocks stay compiled, in either order, without a graph more than the stock model."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
from caches import ACTS, STEPS, fitting, one_each, ready
from probes import difference
from test_compile import LAYERS, compile_blocks, graphs
from tiny import build, run
from torch._dynamo.utils import counters

from chitu_diffusion import patch

pytestmark = pytest.mark.filterwarnings("ignore::chitu_hooks.ChituWarning")
TWO_GRAPHS = ("pab", "cubic")
"""Strategies that compute a part of a block, and so have a graph of their own."""

NAMES = ["wan", *(pytest.param(name, marks=pytest.mark.slow) for name in ("flux", "sd3", "qwen", "zimage"))]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@functools.cache
def hooked_eagerly(name: str, label: str) -> torch.Tensor:
    pipe = build(name, LAYERS)
    with patch(pipe, cache=ready(pipe, fitting(name, ACTS[label], LAYERS))):
        return run(name, pipe, STEPS)


@pytest.mark.parametrize("order", ["compile first", "patch first"])
@pytest.mark.parametrize("name", NAMES)
def test_compiled_blocks_take_no_further_graph(name: str, order: str) -> None:
    """All strategies in turn on one pipeline: together they may need no graph that the stock model does not need."""
    table = ACTS if (name, order) == ("wan", "compile first") else one_each(ACTS)
    strategies = {label: params for label, params in table.items() if label not in TWO_GRAPHS}
    expected = {label: hooked_eagerly(name, label) for label in strategies}
    pipe = build(name, LAYERS)
    compile_blocks(pipe.transformer)
    run(name, pipe, STEPS)
    allowed = graphs()
    torch._dynamo.reset()
    counters.clear()
    pipe = build(name, LAYERS)
    if order == "compile first":
        compile_blocks(pipe.transformer)
    for number, (label, params) in enumerate(strategies.items()):
        with patch(pipe, cache=ready(pipe, fitting(name, params, LAYERS))) as handle:
            if order == "patch first" and not number:
                compile_blocks(pipe.transformer)
            for _ in range(2):
                assert torch.equal(run(name, pipe, STEPS), expected[label]), label
            assert handle.report().features[0]["hits"] > 0
            assert 0 < graphs() <= allowed, label


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize(("name", "order"), [("wan", "compile first"), ("flux", "patch first")])
@pytest.mark.parametrize("label", TWO_GRAPHS)
def test_a_part_of_a_block_takes_two_graphs(label: str, name: str, order: str, backend: str) -> None:
    """One that keeps and one that recalls, for each block class; none a step, none a layer, none a number of tokens."""
    pipe = build(name, LAYERS)
    with patch(pipe, cache=ACTS[label]):
        expected = run(name, pipe, STEPS)
    pipe = build(name, LAYERS)
    compile_blocks(pipe.transformer, backend)
    plain, allowed = run(name, pipe, 2), graphs()
    assert allowed and plain.isfinite().all()
    torch._dynamo.reset()
    counters.clear()
    pipe = build(name, LAYERS)
    if order == "compile first":
        compile_blocks(pipe.transformer, backend)
    with patch(pipe, cache=ACTS[label]) as handle:
        if order == "patch first":
            compile_blocks(pipe.transformer, backend)
        for _ in range(2):
            result = run(name, pipe, STEPS)
            assert difference(result, expected) <= (0.0 if backend == "eager" else 1e-5)
            assert handle.report().features[0]["hits"] > 0
            assert allowed < graphs() <= 2 * allowed
