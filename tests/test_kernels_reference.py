"""Every kernel that can be used on this machine, against attention written out in float64.

On the CPU these are torch's own kernels. On a CUDA machine the same tests run on every kernel that is installed there:
``CUDA_VISIBLE_DEVICES=0 python -m pytest tests/test_kernels_reference.py``.

Shape legend: B batch, S query tokens, T key tokens, H heads, G key heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from chitu_diffusion.attention import AttentionCall, Kernel, kernels
from chitu_diffusion.attention.call import mask_kind

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DIMS = (32, 40, 64, 72, 96, 128, 160, 256, 512)
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Largest error, relative to the largest value of the output: a few units in the last place of each dtype."""
QUANTISED = 0.15
"""The same for kernels that say they are lossy."""


def reference(
    q_BSHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, mask: Tensor | None, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Attention written out in float64, with zeros for a query that sees no key; and the log-sum-exp (B, H, S)."""
    q, k, v = (t.double().transpose(1, 2) for t in (q_BSHD, k_BTGD, v_BTGD))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], device=q.device).tril().bool(), -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.double()
    return (scores.softmax(-1).nan_to_num(0.0) @ v).transpose(1, 2), scores.logsumexp(-1)


@dataclass(frozen=True)
class Case:
    B: int = 2
    S: int = 33
    T: int = 33
    H: int = 4
    G: int = 4
    mask: Callable[[Case], Tensor] | None = None
    causal: bool = False
    scale: float | None = None
    layout: str = "contiguous"


def rand(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(sum(shape)))


ZERO = torch.tensor([0])


def keys(c: Case) -> Tensor:
    return torch.arange(c.T) < torch.tensor([c.T - 3 - 5 * b for b in range(c.B)])[:, None, None, None]


def visible(c: Case) -> Tensor:
    return (rand(c.B, 1, c.S, c.T) < 0.6).index_fill_(3, ZERO, True)


def no_key(c: Case) -> Tensor:
    return visible(c).index_fill_(2, torch.tensor([2, 7]), False)


def no_key_of_a_sample(c: Case) -> Tensor:
    return keys(c) & (torch.arange(c.B) > 0)[:, None, None, None]


CASES = {
    "plain": Case(),
    "long": Case(B=1, S=257, T=257),
    "aligned": Case(B=1, S=64, T=128),
    "odd lengths, batch 3": Case(B=3, S=7, T=41),
    "one query": Case(S=1, T=19),
    "one key": Case(S=19, T=1),
    "scale": Case(scale=0.31),
    "grouped": Case(G=2),
    "causal": Case(causal=True),
    "causal, more keys": Case(S=9, T=33, causal=True),
    "causal, more queries": Case(S=33, T=9, causal=True),
    "key mask": Case(mask=keys),
    "key mask, aligned": Case(S=48, T=64, mask=keys),
    "boolean mask": Case(mask=visible),
    "boolean mask by heads": Case(mask=lambda c: visible(c) & (rand(1, c.H, 1, c.T) < 0.8).index_fill(3, ZERO, True)),
    "boolean mask of two dimensions": Case(mask=lambda c: visible(c)[0, 0]),
    "queries without a key": Case(mask=no_key),
    "a sample without a key": Case(mask=no_key_of_a_sample),
    "additive mask by heads": Case(mask=lambda c: 3 * rand(1, c.H, c.S, c.T)),
    "additive mask with infinities": Case(mask=lambda c: torch.zeros(c.B, 1, 1, c.T).masked_fill(~keys(c), -torch.inf)),
    "mask, grouped, scale": Case(S=21, T=50, G=2, mask=keys, scale=0.2),
    "fused projections": Case(layout="fused"),
    "heads first": Case(layout="heads first"),
    "strided elements": Case(layout="strided"),
    "misaligned rows": Case(layout="misaligned"),
}


def laid_out(tensor: Tensor, layout: str, part: int) -> Tensor:
    """The same values in another layout: part `part` of fused projections, heads first, every second element, …"""
    B, S, H, D = tensor.shape
    if layout == "fused":
        room = torch.zeros(B, S, 3, H, D, dtype=tensor.dtype, device=tensor.device)
        view = room[:, :, part]
    elif layout == "heads first":
        view = torch.zeros(B, H, S, D, dtype=tensor.dtype, device=tensor.device).transpose(1, 2)
    elif layout == "strided":
        view = torch.zeros(B, S, H, 2 * D, dtype=tensor.dtype, device=tensor.device)[..., ::2]
    elif layout == "misaligned":
        view = torch.zeros(B, S, H, D + 3, dtype=tensor.dtype, device=tensor.device)[..., 1 : D + 1]
    else:
        return tensor
    return view.copy_(tensor)


def inputs(case: Case, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    g = torch.Generator().manual_seed(dim)
    shapes = ((case.S, case.H), (case.T, case.G), (case.T, case.G))
    tensors = [torch.randn(case.B, length, heads, dim, generator=g) for length, heads in shapes]
    q, k, v = (laid_out(t.to(DEVICE, dtype), case.layout, part) for part, t in enumerate(tensors))
    mask = case.mask(case).to(DEVICE) if case.mask is not None else None
    return q, k, v, mask


def call_of(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> AttentionCall:
    return AttentionCall(
        q.dtype,
        q.device.type,
        q.shape[3],
        q.shape[2],
        k.shape[2],
        v.shape[3],
        mask_kind(mask),
        causal,
        same_length=q.shape[1] == k.shape[1],
        one_key=k.shape[1] == 1,
        key_tokens=k.shape[1],
    )


def error(out: Tensor, expected: Tensor) -> float:
    return float((out.double() - expected).abs().max() / expected.abs().max())


def tolerance(kernel: Kernel, dtype: torch.dtype) -> float:
    return QUANTISED if kernel.exactness == "lossy" else TOLERANCE[dtype]


USABLE = {name: kernel for name, kernel in kernels().items() if kernel.available() is None}


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> None:
    for kernel in USABLE.values():
        kernel.load()


def test_some_kernels_are_usable() -> None:
    assert {"sdpa_math", "sdpa_flash", "diffusers:native"} <= set(USABLE)
    if DEVICE == "cuda":
        assert {"sdpa_efficient", "sdpa_cudnn"} <= set(USABLE)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("name", USABLE)
def test_matches_the_reference_or_refuses(name: str, dtype: torch.dtype, dim: int) -> None:
    kernel, wrong, ran = USABLE[name], {}, []
    for title, case in CASES.items():
        q, k, v, mask = inputs(case, dim, dtype)
        if kernel.refusal(call_of(q, k, v, mask, case.causal)) is not None:
            continue
        ran.append(title)
        before = [t.clone() for t in (q, k, v)]
        out = kernel.run(q, k, v, mask, case.causal, case.scale)
        expected, _ = reference(q, k, v, mask, case.causal, case.scale)
        if out.shape != expected.shape or out.dtype != dtype:
            wrong[title] = f"{out.dtype} {tuple(out.shape)}"
        elif not error(out, expected) <= tolerance(kernel, dtype):
            wrong[title] = error(out, expected)
        if not all(torch.equal(t, b) for t, b in zip((q, k, v), before)):
            wrong[f"{title}: inputs"] = "changed"
    assert wrong == {}
    takes = kernel.refusal(AttentionCall(dtype, DEVICE, dim, 4, 4, dim)) is None
    assert ("aligned" in ran) == takes == bool(ran)


def test_every_case_tells_right_from_wrong() -> None:
    """Leaving the mask, the causal order or the scale away is far outside the tolerance of every dtype."""
    for case in CASES.values():
        q, k, v, mask = inputs(case, 64, torch.float32)
        expected, _ = reference(q, k, v, mask, case.causal, case.scale)
        for changed in (
            (None, case.causal, case.scale) if mask is not None else None,
            (mask, False, case.scale) if case.causal else None,
            (mask, case.causal, None) if case.scale else None,
        ):
            if changed is not None:
                assert error(reference(q, k, v, *changed)[0], expected) > 5 * max(TOLERANCE.values())


def test_flex_of_diffusers() -> None:
    """It runs on the CPU too, slowly; what it would get on CUDA is right, and its causal order, which is not, is refused."""
    kernel, ran = kernels()["diffusers:flex"], []
    for title, case in CASES.items():
        q, k, v, mask = inputs(case, 40, torch.float32)
        call = call_of(q, k, v, mask, case.causal)._replace(device="cuda")
        if kernel.refusal(call) is None:
            ran.append(title)
            out = kernel.run(q, k, v, mask, case.causal, case.scale)
            expected, _ = reference(q, k, v, mask, case.causal, case.scale)
            assert error(out, expected) <= TOLERANCE[torch.float32], title
    assert ran == [title for title, case in CASES.items() if not case.causal]


@pytest.mark.parametrize("name", ["sdpa_flash", "sdpa_efficient", "sdpa_cudnn"])
def test_shapes_without_a_device(name: str) -> None:
    """The code around torch's CUDA operators, on tensors without data: what the graph of a compiled model is built of."""
    kernel, ran = kernels()[name], []
    for title, case in CASES.items():
        for dim in DIMS:
            q, k, v, mask = (None if t is None else t.to("meta") for t in inputs(case, dim, torch.bfloat16))
            call = call_of(q, k, v, mask, case.causal)._replace(device="cuda")
            if kernel.refusal(call) is not None:
                continue
            ran.append(title)
            out = kernel.run(q, k, v, mask, case.causal, case.scale)
            assert out.shape == q.shape and out.dtype == q.dtype
            if mask is None and not case.causal:
                out, lse = kernel.run_with_lse(q, k, v, case.scale)
                assert out.shape == q.shape and lse.shape == (case.B, case.H, case.S)
    assert "plain" in ran and ("boolean mask" in ran) == (name != "sdpa_flash")


REFUSED = {
    "sdpa_flash": {"float64"},
    "sdpa_efficient": {"float64"},
    "sdpa_cudnn": {"float64", "float32"},
    "fa2": {"float64", "float32"},
    "fa3": {"float64", "float32"},
    "xformers": {"float64"},
    "sage": {"float64", "float32"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_no_dtype_is_cast_quietly(name: str) -> None:
    """What is not on the list of a kernel's dtypes is refused: nothing is computed in half precision behind one's back."""
    kernel = kernels()[name]
    device = kernel.abilities.devices[-1]
    reasons = {
        str(dtype).removeprefix("torch."): kernel.refusal(AttentionCall(dtype, device, 64, 4, 4, 64))
        for dtype in DTYPES
    }
    refused = {dtype for dtype, reason in reasons.items() if reason is not None}
    assert REFUSED[name] <= refused
    if name == "sdpa_flash":
        refused -= {"float32"}  # FlashAttention has none on CUDA, torch's kernel for the CPU has
    if name == "fa3":
        refused -= {"float16"}  # depends on how it was built
    assert refused == REFUSED[name]
    assert all(f"not {dtype}" in str(reasons[dtype]) for dtype in REFUSED[name])


@pytest.mark.parametrize("dim", (40, 64, 128))
@pytest.mark.parametrize("name", [name for name, kernel in USABLE.items() if kernel.returns_lse])
def test_log_sum_exp(name: str, dim: int) -> None:
    kernel = USABLE[name]
    ran = 0
    for dtype in DTYPES:
        for title in ("plain", "long", "odd lengths, batch 3", "grouped", "scale", "one query"):
            case = CASES[title]
            q, k, v, _ = inputs(case, dim, dtype)
            if kernel.refusal(call_of(q, k, v, None, False)) is not None:
                continue
            ran += 1
            out, lse = kernel.run_with_lse(q, k, v, case.scale)
            expected, expected_lse = reference(q, k, v, None, False, case.scale)
            assert lse.shape == expected_lse.shape and lse.dtype == torch.float32
            assert error(out, expected) <= TOLERANCE[dtype]
            assert float((lse.double() - expected_lse).abs().max()) <= max(TOLERANCE[dtype], 1e-5)
    assert ran or DEVICE == "cpu"


def test_the_compiler_is_told_the_shapes_of_flash_attention_3() -> None:
    q, k, v = (torch.empty(2, tokens, heads, 64, dtype=torch.bfloat16) for tokens, heads in ((5, 4), (7, 2), (7, 2)))
    expected = kernels()["sdpa_efficient" if DEVICE == "cuda" else "sdpa_flash"].run_with_lse(
        *(tensor.to(DEVICE) for tensor in (q, k.repeat(1, 1, 2, 1), v.repeat(1, 1, 2, 1))), None
    )
    told = torch.ops.chitu.flash_attention_3(*(tensor.to("meta") for tensor in (q, k, v)), 0.125, False)
    assert [(t.shape, t.dtype) for t in told] == [(t.shape, t.dtype) for t in expected]
    assert all(tensor.is_contiguous() for tensor in told), "as the package allocates them"


@pytest.mark.parametrize("name", kernels())
def test_only_claims_a_log_sum_exp_that_it_has(name: str) -> None:
    kernel = kernels()[name]
    assert kernel.returns_lse == (type(kernel).run_with_lse is not Kernel.run_with_lse)


@pytest.mark.parametrize("name", [name for name in USABLE if not name.startswith("diffusers:")])
def test_compiles_in_one_graph(name: str) -> None:
    """Nothing in a kernel's way of being called breaks a graph; the reference decides about the result again."""
    kernel = USABLE[name]
    dtype = torch.bfloat16
    for title in ("plain", "key mask", "grouped"):
        case = CASES[title]
        q, k, v, mask = inputs(case, 64, dtype)
        if kernel.refusal(call_of(q, k, v, mask, False)) is not None:
            continue
        torch._dynamo.reset()
        run = torch.compile(kernel.run, backend="aot_eager", fullgraph=True)
        out = run(q, k, v, mask, False, None)
        assert error(out, reference(q, k, v, mask, False, None)[0]) <= tolerance(kernel, dtype)
