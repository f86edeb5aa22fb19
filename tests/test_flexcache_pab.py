"""Which parts of a block `pab` leaves out: a layer as a whole where it does nothing but attend, attention alone elsewhere."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from caches import STEPS
from tiny import build, run
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from variants import flux_ip_adapter

from chitu_diffusion import PAB, patch
from chitu_diffusion.flexcache.kept import only_attends

pytestmark = pytest.mark.filterwarnings("ignore::chitu_hooks.ChituWarning")
COMPUTED = 6
"""Of `STEPS`, with an interval of 2 from the second position to the last but one."""


def counted(module: Any) -> Counter[str]:
    """Dotted path of each linear layer -> how often it ran, from now on."""
    ran: Counter[str] = Counter()
    for path, layer in module.named_modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_pre_hook(lambda *_, path=path: ran.update([path]))
    return ran


def calls(ran: Counter[str], part: str) -> set[int]:
    found = {number for path, number in ran.items() if part in path}
    assert found, part
    return found


def test_projections_are_left_out_too() -> None:
    pipe = build("flux")
    ran = counted(pipe.transformer)
    with patch(pipe, cache=PAB(interval=2)):
        run("flux", pipe, STEPS, guided=False)
    assert calls(ran, ".to_q") == calls(ran, ".to_out.0") == calls(ran, ".add_k_proj") == {COMPUTED}
    assert calls(ran, ".ff.") == calls(ran, ".proj_mlp") == calls(ran, ".proj_out") == {STEPS}


def test_one_kind_alone_leaves_out_attention_only() -> None:
    pipe = build("wan")
    ran = counted(pipe.transformer)
    with patch(pipe, cache=PAB(interval=2, kinds="cross")) as handle:
        run("wan", pipe, STEPS, guided=False)
        assert handle.report().features[0]["hits"] == STEPS - COMPUTED
    assert calls(ran, ".attn2.to_q") == {STEPS}


def test_an_mlp_inside_a_layer_is_computed() -> None:
    """FLUX.2's single blocks project for attention and MLP at once: there only attention is recalled."""
    pipe = build("flux2")
    with patch(pipe) as handle:
        alone = {type(site.module).__name__: only_attends(site) for site in handle.sites.attention}
    assert alone == {"Flux2Attention": True, "Flux2ParallelSelfAttention": False}
    ran = counted(pipe.transformer)
    with patch(pipe, cache=PAB(interval=2)) as handle, sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as counter:
            run("flux2", pipe, STEPS)
        flops = handle.report().features[0]["flops"]
    assert calls(ran, "to_qkv_mlp_proj") == {STEPS} and calls(ran, ".attn.to_k") == {COMPUTED}
    assert flops["spent"] == sum(counter.get_flop_counts()[type(pipe.transformer).__name__].values()) < flops["full"]


def test_a_processor_with_weights_runs() -> None:
    """What an image prompt adds is projected inside the processor, so the layer is not left out as a whole."""
    variant = flux_ip_adapter()
    stock = variant.call()
    ran = counted(variant.pipe.transformer)
    with patch(variant.pipe, cache=PAB(interval=2)) as handle:
        result = variant.call()
        assert handle.report().features[0]["hits"] > 0
    assert calls(ran, "to_k_ip") == calls(ran, "x_embedder")
    assert max(calls(ran, "single_transformer_blocks.0.attn.to_q")) < max(ran.values())
    assert not torch.equal(result, stock)


@pytest.mark.parametrize("kinds", ["all", "self"])
def test_a_layer_that_is_called_twice_keeps_both_outputs(kinds: str) -> None:
    """Blocks that take frames window by window do that. Two copies of the layer say what is right."""
    found = []
    for shared in (True, False):
        pipe = build("flux")
        first, second = pipe.transformer.transformer_blocks
        if shared:
            second.attn = first.attn
        else:
            second.attn.load_state_dict(first.attn.state_dict())
        with patch(pipe, cache=PAB(interval=3, kinds=kinds)) as handle:
            found.append(run("flux", pipe, STEPS))
            assert handle.report().features[0]["hits"] > 0
    assert torch.equal(*found)
