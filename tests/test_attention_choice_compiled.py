"""Kernels under `compile_repeated_blocks`: as many graphs as without us, and refusals that read like any other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from probes import difference
from test_attention_choice import STEPS, Narrow, latents, masked_arguments, on
from tiny import build, run
from torch._dynamo.utils import counters

from chitu_diffusion import patch
from chitu_diffusion.attention.kernel import MASKS
from chitu_hooks import RefusedError
from chitu_hooks.state import ACTIVE

LAYERS = 12
"""More than torch.compile's limit of recompilations for one function."""


@pytest.fixture(autouse=True)
def _no_graphs() -> Any:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


FIRST, AFTER = "compiled, then patched", "patched, then compiled"


def compiled(pipe: Any, fullgraph: bool = True) -> Any:
    if pipe.transformer._repeated_blocks:
        pipe.transformer.compile_repeated_blocks(fullgraph=fullgraph, backend="eager")
    else:  # diffusers has not listed PixArt's
        for block in pipe.transformer.transformer_blocks:
            block.compile(fullgraph=fullgraph, backend="eager")
    return pipe


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    "name, attention, order",
    [
        ("flux", "sdpa_flash", FIRST),
        ("flux", "sdpa_flash", AFTER),
        ("flux", "auto", FIRST),
        ("flux", "diffusers:native", AFTER),
        ("qwen", "sdpa_flash", FIRST),
        ("pixart", "sdpa_flash", AFTER),
        ("pixart", "auto", AFTER),
    ],
)
def test_as_many_graphs_as_the_stock_model(name: str, attention: str, order: str) -> None:
    pipe = compiled(build(name, LAYERS))
    before = run(name, pipe, STEPS)
    stock = graphs()
    assert 0 < stock <= 4
    torch._dynamo.reset()
    counters.clear()

    pipe = build(name, LAYERS)
    if order == FIRST:
        compiled(pipe)
    with patch(pipe, attention=attention):
        if order == AFTER:
            compiled(pipe)
        assert difference(run(name, pipe, STEPS), before) < 1e-4
        assert graphs() == stock
        run(name, pipe, STEPS + 1)
        assert graphs() == stock, "none is added by a second generation"
    with patch(pipe, attention=attention):
        run(name, pipe, STEPS)
        assert graphs() == stock, "nor by a second handle"


def test_the_kernel_is_in_the_graph() -> None:
    """Without this, the counts above could be those of the stock call."""
    pipe, kernel = build("flux"), Narrow()
    before = run("flux", pipe, STEPS)
    with on(compiled(pipe), kernel):
        assert difference(run("flux", pipe, STEPS), before) < 1e-4
    pipe, kernel = build("flux"), Narrow()
    kernel.run = lambda q, k, v, mask, causal, scale: torch.zeros_like(q)  # type: ignore[method-assign]
    with on(compiled(pipe), kernel):
        assert difference(run("flux", pipe, STEPS), before) > 1e-3


@pytest.mark.parametrize(
    "name, order, fullgraph", [("qwen", FIRST, True), ("qwen", AFTER, False), ("pixart", AFTER, True)]
)
def test_a_refusal_reaches_the_user_as_it_is(name: str, order: str, fullgraph: bool) -> None:
    pipe = build(name, 3)
    before = latents(pipe, masked_arguments(name))
    if order == FIRST:
        compiled(pipe, fullgraph)
    with on(pipe, Narrow()) as handle:
        if order == AFTER:
            compiled(pipe, fullgraph)
        with pytest.raises(RefusedError) as caught:
            latents(pipe, masked_arguments(name))
        layer, reason = str(caught.value).split(": ", 1)
        assert layer in [site.path for site in handle.sites.attention]
        assert reason.startswith("narrow takes no mask, and this layer has one")
        assert "\n" not in reason and "usable here" in reason
        assert type(caught.value).__name__ == "RefusedError"
        assert ACTIVE.call is ACTIVE.attention is ACTIVE.frame is None
        with pytest.raises(RefusedError):
            latents(pipe, masked_arguments(name))
    assert difference(latents(pipe, masked_arguments(name)), before) < 1e-4, "and the pipeline works again"


def test_masks_that_come_later_are_refused_too() -> None:
    """A graph without a mask must not be used for a call with one."""
    pipe, kernel = compiled(build("zimage", 3)), Narrow()
    with on(pipe, kernel):
        run("zimage", pipe, STEPS)
        with pytest.raises(RefusedError, match="narrow takes no mask"):
            latents(pipe, masked_arguments("zimage"))


def test_a_mask_is_in_the_graph() -> None:
    pipe, kernel = compiled(build("qwen")), Narrow(masks=MASKS)
    before = latents(pipe, masked_arguments("qwen"))
    with on(pipe, kernel):
        assert difference(latents(pipe, masked_arguments("qwen")), before) < 1e-4
    torch._dynamo.reset()
    pipe = build("qwen")
    with on(compiled(pipe), Narrow(masks=MASKS, drops_masks=True)):
        assert difference(latents(pipe, masked_arguments("qwen")), before) > 1e-3
