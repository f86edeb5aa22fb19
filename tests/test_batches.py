"""A batch of two equals the same two alone, and caches work on batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from probes import Keep, Scale, Watch, difference
from tiny import TINY, build, call_arguments, run

from chitu_hooks import patch


def half(value: Any, index: int) -> Any:
    if isinstance(value, torch.Tensor) and value.shape[0] == 2:
        return value[index : index + 1]
    return value[index : index + 1] if isinstance(value, list) and len(value) == 2 else value


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("features", ["watch", "skip"])
def test_a_batch_equals_its_samples_alone(name: str, features: str) -> None:
    make = (lambda: [Watch(), Scale(0.9)]) if features == "watch" else (lambda: [Keep(0, 2)])
    together = call_arguments(name, 4, batch=2)
    shape = run(name, build(name), 1, batch=2).shape
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    if name == "flux2_klein":
        latents = None  # it packs latents of its own shape: one seed a sample instead
    results = []
    for index in (None, 0, 1):
        kwargs = dict(together) if index is None else {key: half(value, index) for key, value in together.items()}
        if latents is not None:
            kwargs["latents"] = (latents if index is None else half(latents, index)).clone()
        seeds = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
        kwargs["generator"] = seeds if index is None else seeds[index]
        pipe = build(name)
        with patch(pipe, make()) as handle:
            out = pipe(**kwargs)
            assert all(c["skipped"] == 2 for c in handle.report().branches.values()) == (features == "skip")
        results.append(next(iter(out.values())))
    both, *alone = results
    for index, single in enumerate(alone):
        assert difference(both[index], single[0]) < 1e-5, index
    assert not torch.equal(both[0], both[1])


@pytest.mark.parametrize("name", ["flux", "qwen", "pixart", "zimage", "flux2_klein"])
def test_several_pictures_a_prompt(name: str) -> None:
    pipe, cache = build(name), Keep(0, 2)
    stock = run(name, pipe, 4, num_images_per_prompt=2)
    with patch(pipe, [Keep(*range(4))]):
        assert torch.equal(run(name, pipe, 4, num_images_per_prompt=2), stock)
    with patch(pipe, [cache]):
        result = run(name, pipe, 4, num_images_per_prompt=2)
    assert result.shape == stock.shape
    assert stock.shape[0] == 2
    assert sum(cache.skips) == 2 * TINY[name].branches
    assert not torch.equal(result, stock)
