"""A transformer whose weights torchao has quantised: its tensors are a class of their own."""

from __future__ import annotations

import pytest
import torch
from probes import Keep, Watch
from tiny import build, run
from variants_more import int8_weights

from chitu_diffusion import Static
from chitu_diffusion import patch as patch_by_words
from chitu_hooks import patch

pytest.importorskip("torchao.quantization")


@pytest.mark.parametrize("order", ["quantise first", "patch first"])
@pytest.mark.parametrize("name", ["flux", "wan"])
def test_quantised_weights(name: str, order: str) -> None:
    plain = build(name)
    exact = run(name, plain, 4)
    int8_weights(plain)
    expected = run(name, plain, 4)
    assert not torch.equal(exact, expected), "quantising acts"
    pipe, watch, cache = build(name), Watch(), Keep(0, 2)
    if order == "quantise first":
        int8_weights(pipe)
    handle = patch(pipe, [watch])
    if order == "patch first":
        int8_weights(pipe)
    assert torch.equal(run(name, pipe, 4), expected)
    assert watch.counts["attention"] > 0
    handle.undo()
    assert torch.equal(run(name, pipe, 4), expected)
    with patch(pipe, [cache]):
        assert not torch.equal(run(name, pipe, 4), expected)
    assert any(cache.skips)
    with patch_by_words(pipe, cache=Static(steps=(0, 2))) as handle:
        run(name, pipe, 4)
        assert handle.report().features[0]["flops"]["saved"] > 0
