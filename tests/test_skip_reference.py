"""Skipping equals an independent reference: stacks swapped for modules that add residuals, by plain torch."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from probes import Keep
from stacks import STACKS
from tiny import ALL, build, run
from torch import nn

from chitu_hooks import patch

STEPS = 6
COMPUTED = (0, 1, 3)


class Recorder(nn.Module):
    """Stands for a stack: runs it, and keeps what its blocks added from first entry to last exit."""

    def __init__(self, blocks: nn.ModuleList, returns: tuple[str, ...], store: dict[str, torch.Tensor | None]) -> None:
        super().__init__()
        object.__setattr__(self, "blocks", blocks)
        self.returns, self.store = returns, store

    def forward(self, skipping: bool, *args: Any, **kwargs: Any) -> Any:
        block = self.blocks[0]
        bound = inspect.signature(block.forward).bind(*args, **kwargs).arguments
        entry = {name: bound[name].clone() for name in self.returns}
        if skipping:
            added = self.store
        else:
            for block in self.blocks:
                result = block(**bound)
                exits = result if isinstance(result, tuple) else (result,)
                bound.update(zip(self.returns, exits, strict=True))
            added = {n: None if bound[n] is None else bound[n] - entry[n] for n in self.returns}
            self.store.update(added)
            return result
        exits = tuple(None if added[n] is None else entry[n] + added[n] for n in self.returns)
        return exits if len(exits) > 1 else exits[0]


class Once(nn.Module):
    """One block in place of a whole stack."""

    def __init__(self, recorder: Recorder, skipping: bool) -> None:
        super().__init__()
        object.__setattr__(self, "recorder", recorder)
        self.skipping = skipping

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.recorder(self.skipping, *args, **kwargs)


def reference(name: str, computed: tuple[int, ...]) -> torch.Tensor:
    pipe = build(name)
    transformer, branches = pipe.transformer, ALL[name].branches
    stacks = {path: getattr(transformer, path) for path in STACKS[name]}
    stores: dict[Any, dict[str, Any]] = {}
    calls = 0

    def swap(*_: Any) -> None:
        nonlocal calls
        step, branch = divmod(calls, branches)
        calls += 1
        for path, blocks in stacks.items():
            recorder = Recorder(blocks, STACKS[name][path], stores.setdefault((path, branch), {}))
            setattr(transformer, path, nn.ModuleList([Once(recorder, step not in computed)]))

    transformer.register_forward_pre_hook(swap)
    return run(name, pipe, STEPS)


# The reference passes the same arguments to every block of a stack; Chroma and some others hand each block its own.
@pytest.mark.parametrize("name", ["flux", "flux2_klein", "qwen", "sd3", "wan", "pixart", "cogview4", "ltx"])
def test_skipping_equals_the_reference(name: str) -> None:
    stock = run(name, build(name), STEPS)
    assert torch.equal(reference(name, tuple(range(STEPS))), stock), "the reference itself changes nothing"
    expected = reference(name, COMPUTED)
    pipe, cache = build(name), Keep(*COMPUTED)
    with patch(pipe, [cache]):
        result = run(name, pipe, STEPS)
        again = run(name, pipe, STEPS)
    assert sum(cache.skips) == 2 * (STEPS - len(COMPUTED)) * ALL[name].branches
    assert not torch.equal(expected, stock)
    assert torch.equal(result, expected)
    assert torch.equal(again, expected)
