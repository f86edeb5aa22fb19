"""FLOPs are counted where modules really ran: the same unit for our caches and for those of others."""

from __future__ import annotations

from typing import Any

import pytest
from diffusers import FirstBlockCacheConfig
from tiny import build, run

from chitu_diffusion import EasyCache, FBCache, Static, patch
from chitu_diffusion.bench.watch import FULL, PART, SKIPPED, Watcher, leaf_flops
from chitu_diffusion.flexcache import Params, count_flops, make_params

pytestmark = pytest.mark.filterwarnings("ignore:.*:chitu_hooks.ChituWarning")
STEPS = 6


def watched(pipe: Any, cache: Params | None = None, config: Any = None) -> tuple[Watcher, dict[str, Any]]:
    """What ran in one generation, and what our strategy reported of it."""
    watcher = Watcher()
    with patch(pipe, cache=cache) as handle:
        if config is not None:
            pipe.transformer.enable_cache(config)
        try:
            with watcher.at(handle.sites.denoisers), handle.also(watcher):
                run("flux", pipe, STEPS)
        finally:
            if config is not None:
                pipe.transformer.disable_cache()
        features = handle.report().features
    assert not any(module._forward_pre_hooks for module in pipe.transformer.modules()), "every hook came off"
    return watcher, next((feature for feature in features if feature["exactness"] == "lossy"), {})


def count(watcher: Watcher, kind: str) -> int:
    return sum(kinds[kind] for kinds in watcher.calls.values())


def test_the_leaves_together_are_the_call() -> None:
    pipe = build("flux")
    seen: list[Any] = []
    hook = pipe.transformer.register_forward_pre_hook(lambda m, a, k: seen.append((a, k)), with_kwargs=True)
    run("flux", pipe, 1)
    hook.remove()
    args, kwargs = seen[0]
    leaves = leaf_flops(pipe.transformer, args, kwargs)
    assert sum(leaves.values()) == count_flops(pipe.transformer, args, kwargs).total > 0
    assert min(leaves.values()) >= 0
    watcher, _ = watched(pipe)
    assert watcher.problem is None and watcher.flops == 2 * STEPS * sum(leaves.values())
    assert (count(watcher, FULL), len(watcher.calls)) == (2 * STEPS, 2)
    assert watcher.latents is not None


@pytest.mark.parametrize(
    ("cache", "kind"),
    [
        (Static(steps=(0, 1, 3)), SKIPPED),
        (FBCache(threshold=1.0), PART),
        (EasyCache(threshold=10.0, warmup=1), SKIPPED),
        (make_params("pab", {"begin": 0.0, "end": 1.0}), None),
    ],
    ids=lambda value: getattr(value, "strategy", value),
)
def test_the_count_is_that_of_our_ledger(cache: Params, kind: str | None) -> None:
    watcher, report = watched(build("flux", layers=3), cache)
    assert report["hits"] > 0
    if kind is not None:
        assert count(watcher, kind) == report["hits"]
    assert watcher.flops == pytest.approx(report["flops"]["spent"], rel=1e-9) and report["flops"]["saved"] > 0


def test_blocks_that_diffusers_skips_inside_their_forward_are_seen() -> None:
    """The same policy of two makers is the same number of FLOPs."""
    pipe = build("flux", layers=3)
    theirs, _ = watched(pipe, config=FirstBlockCacheConfig(threshold=1.0))
    ours, report = watched(pipe, FBCache(threshold=1.0))
    assert report["hits"] > 0 and count(theirs, PART) == count(ours, PART) > 0
    assert theirs.flops == ours.flops < watched(pipe)[0].flops
