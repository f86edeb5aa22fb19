"""Offloading, layerwise casting, diffusers' own cache: switched on before or after patching, and left on after undo."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers as D
import pytest
import torch
from probes import Keep, Scale, Watch, difference
from tiny import ALL, build, call_arguments, run

from chitu_hooks import patch

STEPS = 4
CPU = torch.device("cpu")


def model_offload(pipe: Any) -> None:
    pipe.enable_model_cpu_offload(device="cpu")


def group_offload(pipe: Any) -> None:
    pipe.transformer.enable_group_offload(
        onload_device=CPU, offload_device=CPU, offload_type="block_level", num_blocks_per_group=1
    )


def layerwise_casting(pipe: Any) -> None:
    pipe.transformer.enable_layerwise_casting(storage_dtype=torch.bfloat16, compute_dtype=torch.float32)


def first_block_cache(pipe: Any) -> None:
    pipe.transformer.enable_cache(D.FirstBlockCacheConfig(threshold=0.0))


MEASURES: dict[str, Callable[[Any], None]] = {
    "model offload": model_offload,
    "group offload": group_offload,
    "layerwise casting": layerwise_casting,
}
each_measure = pytest.mark.parametrize("measure", MEASURES)
each_order = pytest.mark.parametrize("order", ("measure first", "patch first"))
each_name = pytest.mark.parametrize("name", ("flux", "wan"))


def stock(name: str, switch_on: Callable[[Any], None]) -> torch.Tensor:
    pipe = build(name)
    switch_on(pipe)
    return run(name, pipe, STEPS)


@each_order
@each_measure
@each_name
def test_watching_changes_nothing(name: str, measure: str, order: str) -> None:
    expected, watch, pipe = stock(name, MEASURES[measure]), Watch(), build(name)
    if order == "measure first":
        MEASURES[measure](pipe)
    with patch(pipe, [watch]):
        if order == "patch first":
            MEASURES[measure](pipe)
        for generation in (1, 2):  # accelerate puts its hooks in anew at the end of every call
            assert torch.equal(run(name, pipe, STEPS), expected)
            assert watch.counts["denoiser_in"] == generation * STEPS * ALL[name].branches
            assert watch.counts["trunk_in"] >= generation * STEPS * ALL[name].branches - 1
    for _ in range(2):
        assert torch.equal(run(name, pipe, STEPS), expected)
    assert watch.counts["begin"] == 2, "nothing of ours is left after undo"
    assert not [module for module in pipe.transformer.modules() if "_compiled_call_impl" in vars(module)]


@each_order
@each_measure
@each_name
def test_cache_and_attention_act_as_without(name: str, measure: str, order: str) -> None:
    pipe = build(name)
    if measure == "layerwise casting":
        MEASURES[measure](pipe)  # it changes the weights' precision, and with it the reference
    with patch(pipe, [Keep(0, 2), Scale()]):
        expected = run(name, pipe, STEPS)
    plain, pipe, cache = stock(name, MEASURES[measure]), build(name), Keep(0, 2)
    if order == "measure first":
        MEASURES[measure](pipe)
    with patch(pipe, [cache, Scale()]):
        if order == "patch first":
            MEASURES[measure](pipe)
        assert torch.equal(run(name, pipe, STEPS), expected)
        assert torch.equal(run(name, pipe, STEPS), expected)
    assert sum(cache.skips) == 2 * 2 * ALL[name].branches
    assert not torch.equal(plain, expected)
    assert torch.equal(run(name, pipe, STEPS), plain)


@each_order
@pytest.mark.parametrize("name", ("flux", "wan"))
def test_first_block_cache_of_diffusers(name: str, order: str) -> None:
    expected, watch, pipe = stock(name, first_block_cache), Watch(), build(name)
    if order == "measure first":
        first_block_cache(pipe)
    with patch(pipe, [watch]):
        if order == "patch first":
            first_block_cache(pipe)
        assert torch.equal(run(name, pipe, STEPS), expected)
        assert watch.counts["block_in"] > watch.counts["denoiser_in"] == STEPS * ALL[name].branches
    assert torch.equal(run(name, pipe, STEPS), expected)
    pipe.transformer.disable_cache()
    assert torch.equal(run(name, pipe, STEPS), run(name, build(name), STEPS))


def in_bfloat16(name: str, pipe: Any) -> torch.Tensor:
    given = call_arguments(name, STEPS)
    cast = {key: value.bfloat16() for key, value in given.items() if isinstance(value, torch.Tensor)}
    return pipe(**{**given, **cast})[0]


@pytest.mark.parametrize("name", ("flux", "sd3"))
def test_dtype_changed_after_patching(name: str) -> None:
    plain, pipe, watch = build(name), build(name), Watch()
    plain.to(torch.bfloat16)
    expected = in_bfloat16(name, plain)
    with patch(pipe, [watch]):
        run(name, pipe, STEPS)
        pipe.to(torch.bfloat16)
        assert torch.equal(in_bfloat16(name, pipe), expected)
    assert expected.dtype == torch.bfloat16
    assert watch.counts["begin"] == 2
    assert torch.equal(in_bfloat16(name, pipe), expected)


def test_a_patched_pipe_saves_as_a_stock_one(tmp_path: Path) -> None:
    pipe = build("flux")
    before = run("flux", pipe, STEPS)
    with patch(pipe, [Watch(), Keep(0), Scale()]):
        pipe.save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    assert index["_class_name"] == "FluxPipeline"
    assert not any("chitu" in file.read_text().lower() for file in tmp_path.rglob("*.json"))
    missing = {name: None for name, part in pipe.components.items() if part is None}
    loaded = D.DiffusionPipeline.from_pretrained(tmp_path, **missing)
    loaded.set_progress_bar_config(disable=True)
    loaded.default_sample_size = pipe.default_sample_size
    assert type(loaded) is D.FluxPipeline
    assert difference(run("flux", loaded, STEPS), before) < 1e-5
