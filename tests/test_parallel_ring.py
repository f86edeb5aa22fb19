"""Ring attention in bfloat16: parts put together in float32 are as good as attention in one piece, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parallel_cases import ODD
from ranks import on_ranks
from tiny import build, run

from chitu_diffusion import Parallel, patch
from chitu_diffusion.attention.sdpa import SdpaFlash
from chitu_diffusion.parallel.collectives import split
from chitu_diffusion.parallel.exchange import joined
from chitu_hooks import GenerationError

FACTOR = 2**0.5
"""How much farther from float64 a ring may be than one piece, in the 2-norm: its parts are rounded, which together is as much
as rounding the whole, and then what is put together of them is rounded once more."""

KERNEL = SdpaFlash()
MODELS = ("flux", "sd3", "wan")


def far(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def errors(parts: int, peaked: float, merge: torch.dtype = torch.float32) -> tuple[float, float]:
    """Relative errors of attention in one piece and of a ring, both in bfloat16.

    Args:
        parts: of the keys.
        peaked: factor of the queries: 8 lets a few keys of one part take nearly everything.
        merge: what parts are put together in.
    """
    draw = torch.Generator().manual_seed(parts)
    q, k, v = (torch.randn(1, 250, 4, 64, generator=draw).bfloat16() for _ in range(3))
    q = q * peaked
    expected = torch.nn.functional.scaled_dot_product_attention(*(t.double().transpose(1, 2) for t in (q, k, v)))
    expected = expected.transpose(1, 2)
    out: Any = None
    lse: Any = None
    for keys, values in zip(k.split(list(split(250, parts)), 1), v.split(list(split(250, parts)), 1)):
        out, lse = joined(out, lse, *KERNEL.run_with_lse(q, keys, values, None))
        out, lse = out.to(merge).float(), lse.to(merge).float()
    one = KERNEL.run(q, k, v, None, False, None)
    return far(one, expected), far(out.bfloat16(), expected)


@pytest.mark.parametrize("peaked", [1.0, 8.0])
@pytest.mark.parametrize("parts", [2, 4, 8])
def test_parts_are_as_good_as_one_piece(parts: int, peaked: float) -> None:
    one, ring = errors(parts, peaked)
    assert one > 1e-4, "bfloat16 rounds"
    assert ring < FACTOR * one


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_float32_is_what_makes_them_so(parts: int) -> None:
    one, ring = errors(parts, 1.0, torch.bfloat16)
    assert ring > FACTOR * one


def whole_models(rank: int) -> dict[str, tuple[float, float, int]]:
    """Errors of the latents of a model in bfloat16, alone and as a ring, against the same model in float64."""
    found = {}
    for name in MODELS:
        arguments = {"length": 7, **ODD[name]}
        exact = build(name, 3)
        exact.transformer.double()
        cast = {key: value.double() for key, value in _embeds(name, arguments).items()}
        expected = run(name, exact, 3, **ODD[name], **cast)
        pipe = build(name, 3)
        pipe.transformer.bfloat16()
        cast = {key: value.bfloat16() for key, value in _embeds(name, arguments).items()}
        alone = run(name, pipe, 3, **ODD[name], **cast)
        with patch(pipe, parallel=Parallel(ring=2)) as handle:
            ring = run(name, pipe, 3, **ODD[name], **cast)
            spread = next(f for f in handle.report().features if f["name"] == "context parallel")["calls spread"]
        found[name] = far(alone, expected), far(ring, expected), spread
    return found


def _embeds(name: str, arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    from tiny import call_arguments

    given = call_arguments(name, 3, **arguments)
    return {key: value for key, value in given.items() if isinstance(value, torch.Tensor) and value.is_floating_point()}


def backend_of_diffusers(rank: int) -> str:
    pipe = build("flux")
    pipe.transformer.set_attention_backend("_native_math")
    with patch(pipe, parallel=Parallel(ring=2)):
        try:
            run("flux", pipe, 1)
        except GenerationError as error:
            return str(error)
    return ""


def work(rank: int) -> Any:
    return whole_models(rank), backend_of_diffusers(rank)


@pytest.fixture(scope="module")
def pair() -> list[Any]:
    return on_ranks(work, 2, timeout=60)


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_whole_model_in_bfloat16_is_no_worse_on_a_ring(pair: list[Any], name: str) -> None:
    for rank, _ in pair:
        one, ring, spread = rank[name]
        assert spread > 0 and one > 1e-4
        assert ring < FACTOR * one


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_backend_of_diffusers_is_refused_where_parts_are_asked_for(pair: list[Any]) -> None:
    for _, message in pair:
        assert "the backend set in diffusers gives no log-sum-exp" in message
