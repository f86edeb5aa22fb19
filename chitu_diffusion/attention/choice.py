"""The feature that runs a chosen kernel in the attention seam."""

from __future__ import annotations

from typing import Any

import torch

from chitu_hooks import AttentionContext, Feature, HookMap, Order, PatchError, Refusal, RefusedError, Sites
from chitu_hooks.errors import nearest

from .kernel import AttentionCall, Kernel
from .table import kernels


def make_attention(name: str) -> AttentionChoice:
    """The feature for the kernel called `name`.

    Raises:
        PatchError: there is no such kernel; the message has the nearest names.
    """
    kernel = kernels().get(name)
    if kernel is None:
        raise PatchError(f"no attention kernel {name!r}{nearest(name, kernels())}")
    return AttentionChoice(kernel)


class AttentionChoice(Feature):
    """Every attention call of the denoisers on one kernel, or a refusal that names the layer.

    Args:
        kernel: the kernel to run.
    """

    order = Order.KERNEL

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.name = f"attention={kernel.name}"
        self.exactness = kernel.exactness
        self._layers = 0

    def bind(self, sites: Sites, hook_map: HookMap) -> Refusal | None:
        """First gate: availability, reachable layers, device and dtype of the weights, diffusers' own choices."""
        reason = self.kernel.available()
        if reason is not None:
            return Refusal(f"{self.kernel.name} {reason}", _usable())
        reachable = [site for site in sites.attention if site.reachable]
        if not reachable:
            return Refusal("no attention layer can be reached", "leave attention out")
        self._layers = len(reachable)
        for site in reachable:
            if getattr(site.module.processor, "_parallel_config", None) is not None:
                return Refusal(f"{site.path}: diffusers' own context parallelism is on", "disable it, then patch")
            dtype, device = _weights(site.module)
            call = _assumed_call(site.module, dtype, device)
            reason = self.kernel.refusal(call) if call is not None else None
            if reason is not None:
                return Refusal(f"{site.path}: {self.kernel.name} {reason}", _usable())
        return None

    def attention(
        self, q_BSHD: torch.Tensor, k_BTHD: torch.Tensor, v_BTHD: torch.Tensor, ctx: AttentionContext
    ) -> torch.Tensor:
        """Second gate and run: dtype, mask and head dim of the real call."""
        kernel = self.kernel
        call = AttentionCall(
            dtype=q_BSHD.dtype,
            device=q_BSHD.device.type,
            head_dim=q_BSHD.shape[-1],
            heads=q_BSHD.shape[2],
            key_heads=k_BTHD.shape[2],
            masked=ctx.mask is not None,
            causal=ctx.causal,
            dropout=ctx.dropout,
        )
        reason = kernel.refusal(call)
        if reason is not None:
            layer = ctx.site.path if ctx.site is not None else "an attention layer"
            raise RefusedError(f"{layer}: {kernel.name} {reason}; {_usable()}")
        return kernel.run(q_BSHD, k_BTHD, v_BTHD, ctx.mask, ctx.causal, ctx.scale)

    def report(self) -> dict[str, Any]:
        return {"kernel": self.kernel.name, "layers": self._layers}


def _usable() -> str:
    names = [name for name, kernel in kernels().items() if kernel.available() is None]
    return f"usable here: {', '.join(names)}"


def _weights(module: torch.nn.Module) -> tuple[torch.dtype, str]:
    for parameter in module.parameters():
        if parameter.is_floating_point():
            return parameter.dtype, parameter.device.type
    return torch.get_default_dtype(), "cpu"


def _assumed_call(module: torch.nn.Module, dtype: torch.dtype, device: str) -> AttentionCall | None:
    """What the weights alone tell of a layer's calls; None where they do not tell, so that the second gate decides."""
    heads = getattr(module, "heads", None)
    inner = getattr(module, "inner_dim", None)
    if not isinstance(heads, int) or not isinstance(inner, int) or dtype.itemsize < 2 or device == "meta":
        return None
    # Weights kept on the CPU may be offloaded and run elsewhere: the device is left to the second gate then.
    device = "cuda" if device == "cpu" and torch.cuda.is_available() else device
    return AttentionCall(dtype, device, inner // heads, heads, heads, False, False, 0.0)
