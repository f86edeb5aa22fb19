"""The recorder of `ChituBench/scripts/step_graphs.py`, without a GPU: static tensors, replays, and hooks that stay outside."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from probes import Watch
from tiny import ALL, build, run

from chitu_diffusion import patch

SCRIPTS = Path(__file__).resolve().parent.parent / "ChituBench" / "scripts"
STEPS = 5


@pytest.fixture(scope="module")
def step_graphs() -> Iterator[ModuleType]:
    sys.path.insert(0, str(SCRIPTS))
    try:
        import step_graphs as module

        yield module
    finally:
        sys.path.remove(str(SCRIPTS))


@pytest.mark.parametrize("name", ["flux", "qwen", "sd3", "wan"])
@torch.no_grad()
def test_replays_give_the_bits_of_the_forward(step_graphs: ModuleType, name: str) -> None:
    pipe = build(name)
    expected = [run(name, pipe, STEPS, prompt=prompt) for prompt in (0, 1)]
    before = dict(vars(pipe.transformer))
    watch = Watch()
    with step_graphs.recorded(pipe.transformer, torch.device("cpu")) as graphs, patch(pipe, features=(watch,)):
        got = [run(name, pipe, STEPS, prompt=prompt) for prompt in (0, 1)]
        assert all(torch.equal(a, b) for a, b in zip(got, expected)), (
            "another prompt is another content of the same tensors"
        )
        assert not torch.equal(*got)
        assert graphs.replays == 2 * STEPS * ALL[name].branches - step_graphs.WARM_UP * len(graphs.recordings)
        assert watch.counts["denoiser_in"] == 2 * STEPS * ALL[name].branches, (
            "the hooks of the denoiser run at every call"
        )
    assert dict(vars(pipe.transformer)) == before


def test_another_size_is_another_recording(step_graphs: ModuleType) -> None:
    made = step_graphs.StepGraphs(lambda x, scale=1: (x * scale,), torch.device("cpu"))
    small, large = torch.ones(2), torch.ones(3)
    assert [made(x, scale=s)[0].sum().item() for x in (small, large) for s in (1, 2)] == [2, 4, 3, 6]
    assert len(made.recordings) == 4
