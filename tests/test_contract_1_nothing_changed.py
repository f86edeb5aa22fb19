"""Contract 1: nothing on, nothing changed; every feature at full budget gives the unpatched output bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from probes import Scale, SdpaCounter, Watch, every
from tiny import ALL, build, run

from chitu_hooks import Handle, patch

STEPS = 3


@pytest.mark.parametrize("name", ALL)
def test_patch_without_features(name: str) -> None:
    pipe = build(name)
    before = run(name, pipe, STEPS)
    with patch(pipe) as handle:
        assert handle.active
        assert torch.equal(run(name, pipe, STEPS), before)


@pytest.mark.parametrize("name", ALL)
def test_watching_every_seam_changes_nothing(name: str) -> None:
    pipe, watch, runs = build(name), Watch(), {}
    with SdpaCounter() as stock:
        before = run(name, pipe, STEPS)
    with patch(pipe, [watch]) as handle:
        assert torch.equal(run(name, pipe, STEPS), before), "the run in which streams are inferred"
        first = watch.counts.copy()
        hooks = [block.module.register_forward_hook(_count(runs, block.path)) for block in _blocks(handle)]
        with SdpaCounter() as hooked:
            assert torch.equal(run(name, pipe, STEPS), before)
    for hook in hooks:
        hook.remove()

    assert first["bind"] == first["begin"] == first["end"] == 1
    assert first["trunk_in"] == first["trunk_out"], "a trunk that was entered is left, also while it is inferred"
    seen = watch.counts - first
    own = [site for site in handle.sites.attention if not site.reachable and not hasattr(site.module, "processor")]
    out_of_reach = len(own) * ALL[name].branches * STEPS
    calls = ALL[name].branches * STEPS
    assert seen["begin"] == seen["end"] == 1
    assert seen["step_in"] == seen["step_out"] == STEPS
    assert seen["denoiser_in"] == seen["denoiser_out"] == calls
    assert seen["attention"] + out_of_reach == hooked.calls == stock.calls > 0
    assert seen["trunk_in"] == seen["trunk_out"] == calls
    assert seen["block_in"] == seen["block_out"] == sum(runs.values()) > 0
    assert all(times == calls for times in runs.values())


def _blocks(handle: Handle) -> list[Any]:
    return [block for block in handle.sites.blocks if block.stack.returns]


def _count(runs: dict[str, int], path: str) -> Any:
    return lambda *_: runs.__setitem__(path, runs.get(path, 0) + 1)


@pytest.mark.parametrize("name", ALL)
def test_attention_out_of_reach_is_named(name: str) -> None:
    with patch(build(name), [Watch()]) as handle:
        found = {path.rpartition(".")[2] for path in handle.report().unreachable}
    # Sana's linear attention calls no attention kernel; Mochi's text pooling calls one without a processor.
    assert found == {"sana": {"attn1"}, "mochi": {"pooler"}}.get(name, set())


@pytest.mark.parametrize("name", ALL)
def test_a_step_cache_with_full_budget_changes_nothing(name: str) -> None:
    pipe, cache = build(name), every()
    before = run(name, pipe, STEPS)
    with patch(pipe, [cache]):
        assert torch.equal(run(name, pipe, STEPS), before)
        assert torch.equal(run(name, pipe, STEPS), before)
    assert len(cache.log) == 2 * STEPS * ALL[name].branches
    assert not any(cache.skips)


@pytest.mark.parametrize("name", ALL)
def test_an_attention_feature_acts(name: str) -> None:
    """Without this, every test above could pass with the attention seam out of order."""
    pipe = build(name)
    before = run(name, pipe, STEPS)
    with patch(pipe, [Scale(1.0)]):
        assert torch.equal(run(name, pipe, STEPS), before)
    with patch(pipe, [Scale(0.5)]):
        assert not torch.equal(run(name, pipe, STEPS), before)
