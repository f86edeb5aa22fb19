"""A kernel with narrow abilities over whole pipelines: it never sees a call that it cannot do, and the user reads why."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from probes import SdpaCounter, difference
from tiny import ALL, MEDIUM, TINY, build, call_arguments, noise, rand, run
from torch import Tensor

from chitu_diffusion import patch
from chitu_diffusion.adapters import registry
from chitu_diffusion.attention import AttentionCall, AttentionFeature, Kernel, kernels, table
from chitu_diffusion.attention.call import mask_kind
from chitu_diffusion.attention.choice import NamedAttention
from chitu_diffusion.attention.kernel import FLOATS, KEY, MASKS, Abilities
from chitu_hooks import PatchError, RefusedError
from chitu_hooks import patch as hook
from chitu_hooks.state import ACTIVE

STEPS = 2


class Narrow(Kernel):
    """Attention written out; it notes every call, and fails on one that `abilities` do not cover."""

    name = "narrow"

    def __init__(self, unusable: str | None = None, drops_masks: bool = False, **abilities: Any) -> None:
        self.abilities = Abilities(**{"devices": ("cpu",), "dtypes": FLOATS, "max_head_dim": 512, **abilities})
        self.unusable = unusable
        self.drops_masks = drops_masks
        self.calls: list[AttentionCall] = []
        self.threads: set[int] = set()

    def available(self) -> str | None:
        return self.unusable

    def run(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> Tensor:
        if not torch.compiler.is_compiling():
            assert q.dtype == k.dtype == v.dtype
            assert q.shape[0] == k.shape[0] == v.shape[0] and k.shape[:3] == v.shape[:3]
            heads = (q.shape[3], q.shape[2], k.shape[2], v.shape[3])
            call = AttentionCall(q.dtype, q.device.type, *heads, mask_kind(mask), causal)
            if mask is not None:
                mask.expand(q.shape[0], q.shape[2], q.shape[1], k.shape[1])  # raises where it does not broadcast
            assert self.abilities.refusal(call) is None
            self.calls.append(call)
            self.threads.add(threading.get_ident())
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
        if mask is not None and not self.drops_masks:
            scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        return (scores.softmax(-1) @ v).transpose(1, 2)


def on(pipe: Any, kernel: Kernel) -> Any:
    return hook(pipe, [NamedAttention(kernel)], registry=registry())


def masked_arguments(name: str) -> dict[str, Any]:
    """Arguments of a call whose attention has a mask."""
    if name == "zimage":  # prompts that take different numbers of its blocks of 32 tokens
        g = noise(3)
        over = {"prompt_embeds": [rand(g, 6, 16), rand(g, 40, 16)], "negative_prompt_embeds": [rand(g, 5, 16)] * 2}
        return {**call_arguments(name, STEPS), **over}
    return call_arguments(name, STEPS, batch=2)


def latents(pipe: Any, arguments: dict[str, Any]) -> Tensor:
    out = next(iter(pipe(**arguments).values()))
    return out if isinstance(out, Tensor) else torch.stack(list(out))


MASKED = ("qwen", "lumina2", "zimage", "pixart")
UNMASKED = ("flux", "flux2_klein", "sd3", "wan")


@pytest.mark.parametrize("name", ALL)
def test_a_kernel_without_masks_sees_none(name: str) -> None:
    """Either every call reaches the kernel and the picture is the same, or the call is refused, by layer and mask."""
    pipe, kernel = build(name), Narrow()
    before = run(name, pipe, STEPS)
    with SdpaCounter() as stock:
        run(name, pipe, STEPS)
    with on(pipe, kernel) as handle:
        try:
            assert difference(run(name, pipe, STEPS), before) < 1e-4
        except RefusedError as error:
            assert name not in UNMASKED
            paths = [site.path for site in handle.sites.attention]
            assert str(error).split(": ")[0] in paths
            assert "narrow takes no mask" in str(error) and "usable here: sdpa_math, sdpa_flash" in str(error)
            assert len(kernel.calls) < len(paths), "refused in the first denoiser call"
        else:
            assert name not in ("qwen", "lumina2", "pixart")
            beyond = sum(not site.reachable for site in handle.sites.attention)  # each is called once a step
            assert len(kernel.calls) == stock.calls - beyond * STEPS > 0
        assert not any(call.mask for call in kernel.calls)
    assert ACTIVE.call is ACTIVE.attention is ACTIVE.frame is None
    assert torch.equal(run(name, pipe, STEPS), before)


@pytest.mark.parametrize("name", MASKED)
def test_a_mask_is_never_dropped(name: str) -> None:
    pipe = build(name)
    before = latents(pipe, masked_arguments(name))
    kernel, dropping = Narrow(masks=MASKS), Narrow(masks=MASKS, drops_masks=True)
    with on(pipe, kernel):
        assert difference(latents(pipe, masked_arguments(name)), before) < 1e-4
    assert any(call.mask for call in kernel.calls)
    with on(pipe, dropping):
        assert difference(latents(pipe, masked_arguments(name)), before) > 1e-3, "the mask matters here"
    assert len(dropping.calls) == len(kernel.calls)
    for chosen in ("sdpa_math", "sdpa_flash"):
        with patch(pipe, attention=chosen):
            assert difference(latents(pipe, masked_arguments(name)), before) < 1e-4


@pytest.mark.parametrize("name", MASKED)
def test_a_mask_is_refused_at_the_first_call(name: str) -> None:
    pipe, kernel = build(name), Narrow()
    with on(pipe, kernel):
        with pytest.raises(RefusedError, match=r"^\w+(\.\w+)+: narrow takes no mask, and this layer has one \(\w+\)"):
            latents(pipe, masked_arguments(name))
    assert not any(call.mask for call in kernel.calls)


def test_kinds_of_mask_are_told_apart() -> None:
    """Lumina's masks are of keys; PixArt's are added, which a kernel that takes only key masks refuses."""
    pipe, kernel = build("lumina2"), Narrow(masks=(KEY,))
    before = latents(pipe, masked_arguments("lumina2"))
    with on(pipe, kernel):
        assert difference(latents(pipe, masked_arguments("lumina2")), before) < 1e-4
    assert {call.mask for call in kernel.calls} >= {KEY}
    pipe = build("pixart")
    with on(pipe, Narrow(masks=(KEY,))):
        with pytest.raises(RefusedError, match="no additive mask, only key ones"):
            run("pixart", pipe, STEPS)


@pytest.mark.parametrize(
    "abilities, reason",
    [
        ({"dtypes": (torch.bfloat16,)}, "takes bfloat16, not float32"),
        ({"max_head_dim": 8}, "takes a head dim of at most 8, not 16"),
        ({"head_dim_multiple": 32}, "takes a head dim of at most 512 in multiples of 32, not 16"),
        ({"head_dims": (64, 128)}, "takes head dims 64, 128, not 16"),
        ({"devices": ("cuda",)}, "runs on cuda, not on cpu"),
        ({"unusable": "needs the package narrow"}, "needs the package narrow"),
    ],
)
def test_what_the_weights_tell_is_refused_when_patching(abilities: dict[str, Any], reason: str) -> None:
    pipe, kernel = build("flux"), Narrow(**abilities)
    before = {site: type(site.processor) for site in pipe.transformer.modules() if hasattr(site, "processor")}
    with pytest.raises(RefusedError, match=f"narrow {reason}; usable here: sdpa_math"):
        on(pipe, kernel)
    assert {site: type(site.processor) for site in before} == before
    assert kernel.calls == []
    assert "_chitu_handle" not in vars(pipe)


@pytest.mark.parametrize(
    "abilities, call, reason",
    [
        ({"grouped": False}, {"key_heads": 2}, "needs as many key heads as heads, and this layer has 2 and 4"),
        ({}, {"key_heads": 3}, "needs heads in whole groups, and this layer has 4 on 3 key heads"),
        ({}, {"value_dim": 32}, "needs one head dim, and this layer has 16 for keys and 32 for values"),
        ({"key_block": 64}, {"key_tokens": 4250}, "needs key tokens in multiples of 64, and this layer has 4250"),
        ({"one_key": False}, {"one_key": True}, "needs at least 2 key tokens, and this layer has 1"),
        ({"causal": False}, {"causal": True}, "has no causal form, and this layer is causal"),
        ({}, {"causal": True, "same_length": False}, "has no causal form for unequal numbers of queries and keys"),
        ({"masks": MASKS}, {"causal": True, "mask": KEY}, "takes a mask or causal order, and this layer asks for both"),
        ({"masks": MASKS}, {"mask": "torch.int64"}, "takes boolean and floating masks, and this layer has one of "),
        ({"masks": MASKS}, {"mask": "class BlockMask"}, "takes boolean and floating masks, and this layer has one of "),
        ({}, {"dropout": 0.1}, "has no dropout, and this layer asks for 0.1"),
        ({}, {"gradient": True}, "computes no gradient"),
        ({}, {"foreign": "window_size"}, "does not know window_size"),
    ],
)
def test_what_only_the_call_tells(abilities: dict[str, Any], call: dict[str, Any], reason: str) -> None:
    kernel = Narrow(**abilities)
    fits = AttentionCall(torch.float32, "cpu", 16, 4, 4, 16)
    assert kernel.refusal(fits) is None
    assert str(kernel.refusal(fits._replace(**call))).startswith(reason)


def test_a_package_that_does_not_load_is_a_refusal() -> None:
    class Broken(Narrow):
        def load(self) -> None:
            raise OSError("libcudart.so.12: cannot open shared object file")

    with pytest.raises(RefusedError, match=r"installed and does not load: libcudart.so.12.*usable here"):
        on(build("flux"), Broken())


def test_an_unknown_name_is_told_the_nearest() -> None:
    with pytest.raises(PatchError, match=r"no attention kernel 'sdpa_flsh'; nearest: .*sdpa_flash"):
        patch(build("flux"), attention="sdpa_flsh")


@pytest.mark.parametrize("name", ["sdpa_cudnn", "sdpa_efficient", "fa2", "fa3", "xformers", "sage", "diffusers:flash"])
def test_a_kernel_that_is_not_here_says_so(name: str) -> None:
    if kernels()[name].available() is None:
        pytest.skip("usable here")
    with pytest.raises(RefusedError, match=f"{name} .+; usable here: sdpa_math"):
        patch(build("flux"), attention=name)


def test_every_kernel_is_one_row() -> None:
    assert [kernel.name for kernel in (cls() for cls in table.OURS)] == list(kernels())[: len(table.OURS)]
    assert len(set(kernels())) == len(table.OURS) + len(table.diffusers_backends())


def test_only_this_pipe() -> None:
    """The VAE's own attention, a pipeline with the same transformer and diffusers' default stay as they were."""
    pipe, kernel = build("sd3"), Narrow()
    sibling = type(pipe).from_pipe(pipe)
    default = _AttentionBackendRegistry._active_backend
    arguments = {**call_arguments("sd3", STEPS), "output_type": "np"}
    stock = pipe(**arguments).images
    vae = [m for m in pipe.vae.modules() if hasattr(m, "processor")]
    assert vae, "this VAE has attention"
    processors = [type(m.processor) for m in vae]
    arguments = {**call_arguments("sd3", STEPS), "output_type": "np"}
    with on(pipe, kernel) as handle:
        with SdpaCounter() as others:
            pictures = pipe(**arguments).images
        assert len(kernel.calls) == len(handle.sites.attention) * STEPS > 0
        assert others.calls == 1, "the VAE's"
        assert abs(pictures - stock).max() < 1e-3
        assert [type(m.processor) for m in vae] == processors
        assert _AttentionBackendRegistry._active_backend is default
        seen = len(kernel.calls)
        assert (sibling(**{**call_arguments("sd3", STEPS), "output_type": "np"}).images == stock).all()
        assert len(kernel.calls) == seen
    assert _AttentionBackendRegistry._active_backend is default


def test_two_threads_with_two_kernels() -> None:
    names = ("flux", "wan")
    pipes = [build(name) for name in names]
    stock = [run(name, pipe, STEPS) for name, pipe in zip(names, pipes)]
    chosen = [Narrow(), Narrow()]
    results: dict[int, list[Tensor]] = {0: [], 1: []}
    barrier = threading.Barrier(2)

    def work(i: int) -> None:
        barrier.wait()
        with torch.no_grad(), on(pipes[i], chosen[i]):
            for _ in range(4):
                results[i].append(run(names[i], pipes[i], STEPS))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(2):
        assert len(results[i]) == 4
        assert all(difference(out, stock[i]) < 1e-4 for out in results[i])
        assert len(chosen[i].threads) == 1 and {c.head_dim for c in chosen[i].calls} == {(16, 12)[i]}


def test_a_gradient_is_refused() -> None:
    """The kernels compute none; without the refusal it would be silently missing."""
    pipe = build("flux")
    with on(pipe, Narrow()), pytest.raises(RefusedError, match="computes no gradient"):
        transformer = pipe.transformer

        def differentiated(module: Any, args: Any, kwargs: Any) -> Any:
            torch.set_grad_enabled(True)

        hook_handle = transformer.register_forward_pre_hook(differentiated, with_kwargs=True)
        try:
            run("flux", pipe, STEPS)
        finally:
            hook_handle.remove()


def test_the_feature_says_what_runs() -> None:
    pipe = build("flux")
    with patch(pipe, attention="sdpa_math") as handle:
        (feature,) = handle.report().features
        assert feature["kernel"] == "sdpa_math" and feature["layers"] == 5 and feature["exactness"] == "close"
        assert "layers that ran on it" not in feature
        run("flux", pipe, STEPS)
        (feature,) = handle.report().features
        assert feature["layers that ran on it"] == 5
    assert issubclass(type(handle.features[0]), AttentionFeature)


def test_a_named_kernel_stands_in_for_a_backend_set_in_diffusers() -> None:
    pipe, kernel = build("flux"), Narrow()
    default = _AttentionBackendRegistry._active_backend
    try:
        pipe.transformer.set_attention_backend("_native_math")
    finally:
        _AttentionBackendRegistry.set_active_backend(default)
    with on(pipe, kernel) as handle:
        run("flux", pipe, STEPS)
        assert handle.report().features[0]["in place of the backend set in diffusers"] == {"_native_math": 5}
    assert kernel.calls


def test_masks_of_two_dimensions() -> None:
    """diffusers reads (batch, keys) where torch reads (queries, keys); what fits both is refused, not guessed."""
    from chitu_diffusion.attention.call import AMBIGUOUS, broadcast_mask

    q, k = torch.zeros(2, 5, 1, 8), torch.zeros(2, 7, 1, 8)
    by_key, by_query = torch.ones(2, 7, dtype=torch.bool), torch.ones(5, 7, dtype=torch.bool)
    assert broadcast_mask(q, k, by_key).shape == (2, 1, 1, 7)
    assert broadcast_mask(q, k, by_query).shape == (5, 7)
    assert broadcast_mask(q[:, :2], k, by_key) == AMBIGUOUS
    assert broadcast_mask(q[:1], k, by_key[:1]).shape == (1, 7)
    reason = Narrow(masks=MASKS).refusal(
        AttentionCall(torch.float32, "cpu", 8, 1, 1, 8, mask_kind(broadcast_mask(q[:, :2], k, by_key)))
    )
    assert "two dimensions" in str(reason)


def test_the_tiny_pipelines_have_the_masks_that_these_tests_need() -> None:
    assert {*MASKED, *UNMASKED} == set(TINY)
    assert MEDIUM
