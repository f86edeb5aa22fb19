"""Attention processors with weights, replaced ones, fused projections, and diffusers' own layer skipping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.hooks import LayerSkipConfig
from diffusers.hooks._helpers import AttentionProcessorRegistry
from diffusers.hooks.layer_skip import apply_layer_skip
from probes import Keep, Scale, SdpaCounter, Watch
from tiny import build, run
from variants import flux_ip_adapter

from chitu_hooks import RefusedError, patch

STEPS = 3
each_order = pytest.mark.parametrize("order", ("before patching", "after patching"))
FUSED = ("flux", "qwen", "pixart", "auraflow")
"""The last two put other processors in when they fuse, and the first ones back when they split."""


# -- IP-Adapter: processors are modules with weights -------------------------------------------------------------------


def test_ip_adapter_weights_and_names_stay() -> None:
    variant = flux_ip_adapter()
    transformer = variant.pipe.transformer
    processor = transformer.transformer_blocks[0].attn.processor
    kind, keys, weight = type(processor), set(transformer.state_dict()), processor.to_k_ip[0].weight
    assert any("to_k_ip" in key for key in keys)
    with patch(variant.pipe, [Scale()]):
        assert transformer.transformer_blocks[0].attn.processor is processor
        assert isinstance(processor, kind)
        assert type(processor).__name__ == kind.__name__
        assert set(transformer.state_dict()) == keys
        assert processor.to_k_ip[0].weight is weight
    assert type(processor) is kind


def test_ip_adapter_scale_set_after_patching_acts() -> None:
    variant, watch = flux_ip_adapter(), Watch()
    full, half, off = variant.call(1.0), variant.call(0.5), variant.call(0.0)
    assert not torch.equal(full, half)
    with patch(variant.pipe, [watch]):
        assert torch.equal(variant.call(0.5), half)
        assert torch.equal(variant.call(0.0), off)
        assert torch.equal(variant.call(1.0), full)
    assert watch.counts["begin"] == 3


# -- fused projections -------------------------------------------------------------------------------------------------


@each_order
@pytest.mark.parametrize("name", FUSED)
def test_fused_projections_are_seen(name: str, order: str) -> None:
    plain, fused = build(name), build(name)
    fused.transformer.fuse_qkv_projections()
    with SdpaCounter() as stock:
        split_output = run(name, plain, STEPS)
    fused_output = run(name, fused, STEPS)

    pipe, watch = build(name), Watch()
    if order == "before patching":
        pipe.transformer.fuse_qkv_projections()
    handle = patch(pipe, [watch])
    if order == "after patching":
        pipe.transformer.fuse_qkv_projections()
    assert torch.equal(run(name, pipe, STEPS), fused_output)
    assert watch.counts["attention"] == stock.calls
    pipe.transformer.unfuse_qkv_projections()
    assert torch.equal(run(name, pipe, STEPS), split_output)
    assert watch.counts["attention"] == 2 * stock.calls
    handle.undo()
    assert torch.equal(run(name, pipe, STEPS), split_output)
    assert watch.counts["attention"] == 2 * stock.calls
    kinds = {path: type(processor) for path, processor in pipe.transformer.attn_processors.items()}
    assert kinds == {path: type(processor) for path, processor in plain.transformer.attn_processors.items()}
    assert not any("_chitu_attention" in vars(processor) for processor in pipe.transformer.attn_processors.values())


def test_a_processor_set_after_patching_is_hooked_at_the_next_generation() -> None:
    pipe, watch = build("pixart"), Watch()
    with patch(pipe, [watch]):
        run("pixart", pipe, STEPS)
        seen = watch.counts["attention"]
        fresh = build("pixart").transformer.attn_processors
        pipe.transformer.set_attn_processor(dict(fresh))
        run("pixart", pipe, STEPS)
        assert watch.counts["attention"] == 2 * seen > 0
    assert {type(p) for p in pipe.transformer.attn_processors.values()} == {
        type(p) for p in build("pixart").transformer.attn_processors.values()
    }


# -- diffusers' layer skipping looks processors up by exact class ------------------------------------------------------


def stack_of(pipe: Any) -> str:
    return "blocks" if hasattr(pipe.transformer, "blocks") else "transformer_blocks"


def skip_scores(pipe: Any) -> None:
    config = LayerSkipConfig([1], fqn=stack_of(pipe), skip_attention=False, skip_attention_scores=True, skip_ff=False)
    apply_layer_skip(pipe.transformer, config)


def skip_block(pipe: Any) -> None:
    apply_layer_skip(pipe.transformer, LayerSkipConfig([1], fqn=stack_of(pipe)))


SKIPS: dict[str, Callable[[Any], None]] = {"attention scores": skip_scores, "whole block": skip_block}


class Opaque:
    """A processor that computes attention where no seam can see it."""

    def __call__(self, attn: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states


def test_a_processor_that_cannot_be_seen_is_refused_at_the_next_generation() -> None:
    pipe, stock = build("wan"), run("wan", build("wan"), STEPS)
    with patch(pipe, [Scale()]):
        scaled = run("wan", pipe, STEPS)
        block = pipe.transformer.blocks[1].attn2
        before, block.processor = block.processor, Opaque()
        with pytest.raises(RefusedError, match=r"blocks\.1\.attn2: Opaque was put there after patching"):
            run("wan", pipe, STEPS)
        block.processor = before
        assert torch.equal(run("wan", pipe, STEPS), scaled)
    assert torch.equal(run("wan", pipe, STEPS), stock)


@each_order
@pytest.mark.parametrize(
    ("name", "skipped"),
    (
        ("qwen", "attention scores"),
        ("cogview4", "attention scores"),
        ("cogview4", "whole block"),
        ("wan", "whole block"),
    ),
)
def test_layer_skipping_of_diffusers(name: str, skipped: str, order: str) -> None:
    plain, other = build(name), build(name)
    SKIPS[skipped](other)
    expected = run(name, other, STEPS)
    assert not torch.equal(expected, run(name, plain, STEPS))

    pipe, watch = build(name), Watch()
    if order == "before patching":
        SKIPS[skipped](pipe)
    with patch(pipe, [watch, Keep(*range(STEPS))]):
        if order == "after patching":
            SKIPS[skipped](pipe)
        assert torch.equal(run(name, pipe, STEPS), expected)
        assert watch.counts["attention"] > 0
    assert torch.equal(run(name, pipe, STEPS), expected)


def test_the_registry_of_diffusers_is_as_before() -> None:
    AttentionProcessorRegistry._register()
    before = dict(AttentionProcessorRegistry._registry)
    one, two = build("qwen"), build("qwen")
    handles = [patch(one, [Scale()]), patch(two, [Scale()])]
    assert len(AttentionProcessorRegistry._registry) > len(before)
    handles.pop().undo()
    assert len(AttentionProcessorRegistry._registry) > len(before), "the other pipeline still needs it"
    handles.pop().undo()
    assert before == AttentionProcessorRegistry._registry
