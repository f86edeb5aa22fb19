"""The features that run a kernel in the attention seam: a named one, or the fastest of the table."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from chitu_hooks import AttentionContext, Feature, HookMap, Order, Refusal, RefusedError, Sites
from chitu_hooks.sites import AttentionSite

from .fastest import fastest
from .kernel import AttentionCall, Kernel
from .table import find_kernel, kernels


def make_attention(name: str) -> AttentionFeature:
    """The feature for the kernel called `name`, or for `auto`.

    Raises:
        PatchError: there is no such kernel; the message has the nearest names.
    """
    return AutoAttention() if name == "auto" else NamedAttention(find_kernel(name))


class AttentionFeature(Feature):
    """What both choices share: which layers are reached, and what one call looks like."""

    order = Order.KERNEL
    layers: int = 0

    def bind(self, sites: Sites, hook_map: HookMap) -> Refusal | None:
        reachable = [site for site in sites.attention if site.reachable]
        if not reachable:
            return Refusal("no attention layer can be reached", "leave attention out")
        for site in reachable:
            if getattr(site.module.processor, "_parallel_config", None) is not None:
                return Refusal(f"{site.path}: diffusers' own context parallelism is on", "disable it, then patch")
        self.layers = len(reachable)
        return self.bind_layers(reachable)

    def bind_layers(self, layers: list[AttentionSite]) -> Refusal | None:
        """First gate for the layers that the seam reaches."""
        raise NotImplementedError


class NamedAttention(AttentionFeature):
    """Every attention call of the denoisers on one kernel, or a refusal that names the layer.

    Args:
        kernel: the kernel to run; it also overrides a backend that the user set in diffusers.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.name = f"attention={kernel.name}"
        self.exactness = kernel.exactness

    def bind_layers(self, layers: list[AttentionSite]) -> Refusal | None:
        reason = self.kernel.available()
        if reason is not None:
            return Refusal(f"{self.kernel.name} {reason}", usable())
        self.kernel.load()
        for site in layers:
            call = assumed_call(site.module)
            reason = self.kernel.refusal(call) if call is not None else None
            if reason is not None:
                return Refusal(f"{site.path}: {self.kernel.name} {reason}", usable())
        return None

    def attention(self, q_BSHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, ctx: AttentionContext) -> Tensor:
        """Second gate and run: what the real call turns out to be."""
        reason = self.kernel.refusal(real_call(q_BSHD, k_BTHD, ctx))
        if reason is not None:
            layer = ctx.site.path if ctx.site is not None else "an attention layer"
            raise RefusedError(f"{layer}: {self.kernel.name} {reason}; {usable()}")
        return self.kernel.run(q_BSHD, k_BTHD, v_BTHD, ctx.mask, ctx.causal, ctx.scale)

    def report(self) -> dict[str, Any]:
        return {"kernel": self.kernel.name, "layers": self.layers}


class AutoAttention(AttentionFeature):
    """Each attention call on the fastest measured kernel that can do it, and never on a lossy one.

    The choice comes from a table of measurements by compute capability, dtype, head dim and length, so that runs and
    ranks agree. Where the table has no row, or the user chose a backend in diffusers, the stock call is left as it is.
    """

    name = "attention=auto"
    exactness = "close"

    def __init__(self) -> None:
        self._candidates: dict[torch.dtype, tuple[tuple[int, int, tuple[Kernel, ...]], ...]] = {}
        """dtype -> rows of (head dim, from how many query tokens, kernels from the fastest)."""

    def bind_layers(self, layers: list[AttentionSite]) -> Refusal | None:
        self._candidates = fastest()
        return None

    def attention(self, q_BSHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, ctx: AttentionContext) -> Tensor | None:
        if ctx.backend is not None:
            return None
        call = real_call(q_BSHD, k_BTHD, ctx)
        if call.device != "cuda":
            return None
        for head_dim, tokens, ranked in self._candidates.get(call.dtype, ()):
            if call.head_dim <= head_dim and q_BSHD.shape[1] >= tokens:
                for kernel in ranked:
                    if kernel.refusal(call) is None:
                        return kernel.run(q_BSHD, k_BTHD, v_BTHD, ctx.mask, ctx.causal, ctx.scale)
                return None
        return None

    def report(self) -> dict[str, Any]:
        rows = [
            f"{str(dtype).removeprefix('torch.')} head dim {head_dim} from {tokens} tokens: {ranked[0].name}"
            for dtype, found in self._candidates.items()
            for head_dim, tokens, ranked in found
            if ranked
        ]
        return {"table": rows or "no measurements for this device: torch's own choice is left", "layers": self.layers}


def real_call(q_BSHD: Tensor, k_BTHD: Tensor, ctx: AttentionContext) -> AttentionCall:
    """What decides whether a kernel can do this call."""
    return AttentionCall(
        dtype=q_BSHD.dtype,
        device=q_BSHD.device.type,
        head_dim=q_BSHD.shape[3],
        heads=q_BSHD.shape[2],
        key_heads=k_BTHD.shape[2],
        masked=ctx.mask is not None,
        causal=ctx.causal,
        dropout=ctx.dropout,
        same_length=not ctx.causal or q_BSHD.shape[1] == k_BTHD.shape[1],
    )


def assumed_call(module: torch.nn.Module) -> AttentionCall | None:
    """What the weights alone tell of a layer's calls; None where they do not tell, so that the second gate decides."""
    heads, inner = getattr(module, "heads", None), getattr(module, "inner_dim", None)
    weight = next((p for p in module.parameters() if p.is_floating_point()), None)
    if not isinstance(heads, int) or not isinstance(inner, int) or weight is None or weight.dtype.itemsize < 2:
        return None
    if weight.device.type == "meta" or (weight.device.type == "cpu" and torch.cuda.is_available()):
        return None  # offloaded: where it will run, and in which dtype, is for the second gate to see
    return AttentionCall(weight.dtype, weight.device.type, inner // heads, heads, heads, False, False, 0.0)


def usable() -> str:
    """The names of the kernels that can be used on this machine."""
    names = [name for name, kernel in kernels().items() if kernel.available() is None]
    return f"usable here: {', '.join(names)}"
