"""`fuse_qkv_projections` before and after patching: some models put new processors in place, which must not go unseen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from probes import SdpaCounter, Watch
from tiny import build, run
from variants_more import FUSED

from chitu_hooks import patch


def attention_calls(name: str, pipe: Any) -> int:
    with SdpaCounter() as counter:
        run(name, pipe, 2)
    return counter.calls


@pytest.mark.parametrize("order", ["fuse first", "patch first"])
@pytest.mark.parametrize("name", FUSED)
def test_every_attention_call_is_still_seen(name: str, order: str) -> None:
    plain = build(name)
    plain.transformer.fuse_qkv_projections()
    expected, calls = run(name, plain, 2), attention_calls(name, plain)
    pipe, watch = build(name), Watch()
    if order == "fuse first":
        pipe.transformer.fuse_qkv_projections()
    with patch(pipe, [watch]):
        if order == "patch first":
            run(name, pipe, 2)
            pipe.transformer.fuse_qkv_projections()
            watch.counts.clear()
        assert torch.equal(run(name, pipe, 2), expected)
        assert watch.counts["attention"] == calls > 0
    assert torch.equal(run(name, pipe, 2), expected)
    assert not any("_chitu_attention" in vars(p) for p in pipe.transformer.attn_processors.values())
