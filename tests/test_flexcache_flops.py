"""FLOPs of every strategy, and of the caches of other makers, are what torch's counter counts in the run itself."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from caches import ACTS, STEPS, fitting, ready
from tiny import build, run
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from chitu_diffusion import patch
from chitu_diffusion.bench.cases import Case
from chitu_diffusion.bench.kinds import KINDS, Setting
from chitu_diffusion.bench.watch import Watcher

pytestmark = pytest.mark.filterwarnings("ignore::chitu_hooks.ChituWarning")

MODULES = [
    r"transformer_blocks\.\d+\.(attn|ff|ff_context)",
    r"single_transformer_blocks\.\d+\.(attn|proj_mlp|proj_out)",
]
"""All modules of FLUX's blocks between two gates; some are leaves, which the cache leaves out inside their call."""

PEERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "first block": ("diffusers", "first_block_cache", {"threshold": 0.5}),
    "magcache": ("diffusers", "magcache", {"mag_ratios": [1.0] * STEPS, "retention_ratio": 0.2}),
    "pab": ("diffusers", "pyramid_attention_broadcast", {"spatial_attention_block_skip_range": 2}),
    "taylorseer": ("diffusers", "taylorseer", {"cache_interval": 3, "disable_cache_before_step": 2}),
    "taylorseer lite": ("diffusers", "taylorseer", {"cache_interval": 3, "use_lite_mode": True}),
    "taylorseer modules": ("diffusers", "taylorseer", {"cache_interval": 3, "cache_identifiers": MODULES}),
    "dbcache": (
        "cache-dit",
        "dbcache",
        {"Fn_compute_blocks": 1, "max_warmup_steps": 2, "residual_diff_threshold": 0.9},
    ),
    "dbcache taylorseer": (
        "cache-dit",
        "dbcache",
        {"Fn_compute_blocks": 1, "max_warmup_steps": 2, "residual_diff_threshold": 0.9, "taylorseer_order": 1},
    ),
}


def counted(name: str, pipe: Any) -> int:
    """What torch's counter counts in the denoiser over one generation; attention as the matrix products that it is."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run(name, pipe, STEPS)
    return sum(counter.get_flop_counts()[type(pipe.transformer).__name__].values())


@pytest.mark.parametrize("label", ACTS)
@pytest.mark.parametrize("name", ["flux", "wan"])
def test_our_books_are_what_was_done(name: str, label: str) -> None:
    pipe, watcher = build(name, 3), Watcher()
    full = counted(name, pipe)
    with patch(pipe, cache=ready(pipe, fitting(name, ACTS[label], 3))) as handle:
        spent = counted(name, pipe)
        feature = handle.report().features[0]
        with watcher.at(handle.sites.denoisers), handle.also(watcher):
            run(name, pipe, STEPS)
    flops = feature["flops"]
    assert feature["hits"] > 0 and spent < full
    assert flops == {"full": full, "spent": spent, "saved": full - spent}
    assert watcher.flops == pytest.approx(spent, rel=1e-9), "the bench counts the same"


@pytest.mark.parametrize("label", PEERS)
def test_the_bench_counts_what_other_makers_did(label: str) -> None:
    kind, use, params = PEERS[label]
    if kind == "cache-dit" and find_spec("cache_dit") is None:
        pytest.skip("cache-dit is not installed")
    pipe, watcher = build("flux", 3), Watcher()
    full = counted("flux", pipe)
    case = Case(kind=kind, use=use, params=params, steps=STEPS, family=label)
    setting = Setting(pipe=pipe, hook_map=None, constants=str, profile=str)
    with KINDS[kind].on(setting, case) as handle:
        spent = counted("flux", pipe)
        with watcher.at(handle.sites.denoisers), handle.also(watcher):
            run("flux", pipe, STEPS)
    assert watcher.problem is None
    assert watcher.flops == pytest.approx(spent, rel=1e-9)
    assert spent < full, "it acted"


def test_frozen_tokens_save_their_share_of_every_layer() -> None:
    """Projections, queries, MLPs of double and single blocks: what is saved is a token's work times the tokens left out."""
    pipe, linears = build("flux", 3), {}
    size = {"height": 64, "width": 64}
    transformer = pipe.transformer
    for path, module in transformer.named_modules():
        own = not re.search(r"norm|add_|to_add_out|context", path)
        if "transformer_blocks." in path and isinstance(module, torch.nn.Linear) and own:
            linears[path] = module, []
            module.register_forward_pre_hook(lambda _, args, seen=linears[path][1]: seen.append(args[0].shape[1]))
    cubic = replace(ACTS["cubic"], active_interval=1)
    with patch(pipe, cache=cubic) as handle:
        run("flux", pipe, STEPS, **size)
        flops = handle.report().features[0]["flops"]
    left_out = {path: [max(rows) - count for count in rows] for path, (_, rows) in linears.items()}
    drops = left_out["transformer_blocks.0.attn.to_q"]
    assert any(drops) and all(found == drops for found in left_out.values()), "every layer leaves out the same tokens"
    attended, inner = max(max(rows) for _, rows in linears.values()), transformer.inner_dim
    layers = len(transformer.transformer_blocks) + len(transformer.single_transformer_blocks)
    a_token = sum(2 * module.weight.numel() for module, _ in linears.values()) + layers * 4 * attended * inner
    assert flops["saved"] == sum(drops) * a_token


def test_a_step_at_which_no_token_is_due_runs_no_block() -> None:
    pipe, ran = build("flux", 3), []
    pipe.transformer.transformer_blocks[0].register_forward_pre_hook(lambda *_: ran.append(1))
    pipe.transformer.single_transformer_blocks[0].register_forward_pre_hook(lambda *_: ran.append(1))
    held = []
    for interval in (1, 2):
        ran.clear()
        with patch(pipe, cache=replace(ACTS["cubic"], active_interval=interval)):
            run("flux", pipe, STEPS)
        held.append(len(ran))
    assert held[0] == 2 * 2 * STEPS
    assert held[1] == held[0] - 2 * 2 * 4, "positions 2, 4, 6 and 8 of 10, for two branches and two stacks"


def test_the_bench_counts_on_where_a_branch_is_new_midway() -> None:
    """Guidance that a callback ends, as diffusers' documentation shows: the branch after it has the name of the one before."""

    def ends(pipe: Any, step: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        if step == 5:
            pipe._guidance_scale = 0.0
            return {name: value.chunk(2)[-1] for name, value in kwargs.items()}
        return {}

    call = {
        "callback_on_step_end": ends,
        "callback_on_step_end_tensor_inputs": ["prompt_embeds", "pooled_prompt_embeds"],
    }
    pipe, watcher = build("sd3", 3), Watcher()
    with patch(pipe, cache=replace(ACTS["cubic"], active_interval=1)) as handle:
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            run("sd3", pipe, STEPS, **call)
        assert handle.report().features[0]["hits"] > 0
        with watcher.at(handle.sites.denoisers), handle.also(watcher):
            run("sd3", pipe, STEPS, **call)
    assert watcher.flops == sum(counter.get_flop_counts()[type(pipe.transformer).__name__].values())


def test_a_sample_that_changes_its_shape_is_not_counted_by_its_first() -> None:
    def grows(pipe: Any, step: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {"latents": torch.nn.functional.interpolate(kwargs["latents"], scale_factor=2)} if step == 5 else {}

    pipe = build("sd3")
    with patch(pipe, cache=ACTS["static"]) as handle:
        run("sd3", pipe, STEPS)
        assert handle.report().features[0]["flops"]["saved"] > 0
        run("sd3", pipe, STEPS, callback_on_step_end=grows)
        feature = handle.report().features[0]
    assert feature["hits"] > 0
    assert feature["flops"] == {"not counted": "transformer / branch 0 had samples of 2 shapes in one generation"}
