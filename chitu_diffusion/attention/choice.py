"""The features that run a kernel in the attention seam: a named one, or the fastest of the table.

Decisions are made outside traced code, see `tracing`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from chitu_hooks import AttentionContext, Feature, HookMap, Order, Refusal, Sites
from chitu_hooks.sites import AttentionSite

from .call import assumed_call, broadcast_mask, real_call
from .fastest import Row, fastest
from .kernel import AttentionCall, Kernel, word
from .table import find_kernel, kernels
from .tracing import Decision, kernel_while_tracing, refusal_while_tracing, refuse

LOAD_ERRORS = (ImportError, OSError, RuntimeError, AttributeError, ValueError)
"""What importing a package raises that is installed and does not work here."""


def make_attention(name: str) -> AttentionFeature:
    """The feature for the kernel called `name`, or for `auto`.

    Raises:
        PatchError: there is no such kernel; the message has the nearest names.
    """
    return AutoAttention() if name == "auto" else NamedAttention(find_kernel(name))


class AttentionFeature(Feature):
    """What both choices share: which layers are reached, and what one call looks like."""

    order = Order.KERNEL

    def __init__(self) -> None:
        self.layers: list[AttentionSite] = []
        self.loaded: dict[str, Kernel] = {}
        """The kernels that may run, by name."""
        self.decided: dict[tuple[AttentionCall, int], Decision] = {}
        self.seen: dict[AttentionCall, set[str]] = {}
        """Kind of call -> paths of the layers that made it where nothing was compiled."""

    def bind(self, sites: Sites, hook_map: HookMap) -> Refusal | None:
        self.layers = [site for site in sites.attention if site.reachable]
        if not self.layers:
            return Refusal("no attention layer can be reached", "leave attention out")
        for site in self.layers:
            if getattr(site.module.processor, "_parallel_config", None) is not None:
                return Refusal(f"{site.path}: diffusers' own context parallelism is on", "disable it, then patch")
        return self.bind_layers()

    def bind_layers(self) -> Refusal | None:
        """First gate for the layers that the seam reaches."""
        raise NotImplementedError

    def decide(self, call: AttentionCall, tokens: int = 0) -> Decision:
        """What to do with `call`, worked out once for each kind of call.

        Args:
            tokens: lower end of the length bucket, see `AutoAttention.bucket`.
        """
        decision = self.decided.get((call, tokens))
        if decision is None:
            decision = self.decided[call, tokens] = self.decide_anew(call, tokens)
        return decision

    def decide_anew(self, call: AttentionCall, tokens: int) -> Decision:
        raise NotImplementedError

    def saw(self, call: AttentionCall, ctx: AttentionContext) -> None:
        """Keep which layer made the call, for the report; not while tracing."""
        if ctx.site is not None:
            self.seen.setdefault(call, set()).add(ctx.site.path)

    def set_in_diffusers(self) -> dict[str, int]:
        """Backend that the user set in diffusers -> number of layers."""
        backends = (getattr(site.module.processor, "_attention_backend", None) for site in self.layers)
        return dict(Counter(str(getattr(b, "value", b)) for b in backends if b is not None))


class NamedAttention(AttentionFeature):
    """Every attention call of the denoisers on one kernel, or a refusal that names the layer.

    Args:
        kernel: the kernel to run; it also overrides a backend that the user set in diffusers.
    """

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self.kernel = kernel
        self.in_parts = False
        """Keys come in parts, as in a ring, whose results are put together by their log-sum-exp."""
        self.name = f"attention={kernel.name}"
        self.exactness = kernel.exactness

    def bind_layers(self) -> Refusal | None:
        kernel = self.kernel
        reason = kernel.available()
        if reason is not None:
            return Refusal(f"{kernel.name} {reason}", usable())
        if self.in_parts and not kernel.returns_lse:
            able = ", ".join(
                name for name, other in kernels().items() if other.returns_lse and other.available() is None
            )
            return Refusal(
                f"{kernel.name} gives no log-sum-exp, by which attention over parts of the keys is put together",
                f"use one of {able}, or no ring",
            )
        try:
            kernel.load()
        except LOAD_ERRORS as error:
            return Refusal(f"{kernel.name} is installed and does not load: {error}", usable())
        for site in self.layers:
            call = assumed_call(site.module)
            reason = kernel.refusal(call) if call is not None else None
            if reason is not None:
                return Refusal(f"{site.path}: {kernel.name} {reason}", usable())
        return None

    def decide_anew(self, call: AttentionCall, tokens: int) -> Decision:
        reason = self.kernel.refusal(call)
        return self.kernel.name, None if reason is None else f"{self.kernel.name} {reason}; {usable()}"

    def attention(self, q_BSHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, ctx: AttentionContext) -> Tensor:
        mask = broadcast_mask(q_BSHD, k_BTHD, ctx.mask)
        self._check(q_BSHD, k_BTHD, v_BTHD, mask, ctx)
        return self.kernel.run(q_BSHD, k_BTHD, v_BTHD, mask, ctx.causal, ctx.scale)

    def attention_with_lse(
        self, q_BSHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, ctx: AttentionContext
    ) -> tuple[Tensor, Tensor]:
        self._check(q_BSHD, k_BTHD, v_BTHD, None, ctx)
        return self.kernel.run_with_lse(q_BSHD, k_BTHD, v_BTHD, ctx.scale)

    def _check(self, q_BSHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, mask: Any, ctx: AttentionContext) -> None:
        """Second gate: what the real call turns out to be."""
        call = real_call(q_BSHD, k_BTHD, v_BTHD, mask, ctx, self.kernel.abilities.key_block)
        if torch.compiler.is_compiling():
            refusal = refusal_while_tracing(self.name, *call, 0)
        else:
            refusal = self.decide(call)[1]
            self.saw(call, ctx)
        if refusal is not None:
            refuse(ctx.layer, refusal, torch.compiler.is_compiling())

    def report(self) -> dict[str, Any]:
        told: dict[str, Any] = {"kernel": self.kernel.name, "layers": len(self.layers)}
        ran = {path for paths in self.seen.values() for path in paths}
        if ran:  # compiled layers tell nothing when they run
            told["layers that ran on it"] = len(ran)
        overridden = self.set_in_diffusers()
        return {**told, "in place of the backend set in diffusers": overridden} if overridden else told


class AutoAttention(AttentionFeature):
    """Each attention call on the fastest measured kernel that can do it, and never on a lossy one.

    The choice comes from a table of measurements by compute capability, dtype, head dim and length, so that runs agree:
    nothing is timed. The ranks of one picture go by the first one's table and by the kernels that all of them have. Where
    the table has no row, or the user chose a backend for this model in diffusers, the stock call is left as it is.
    """

    name = "attention=auto"
    exactness = "close"
    device = "cuda"
    """Device type that the table is about."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: tuple[Row, ...] = ()
        self.buckets: tuple[int, ...] = ()
        """Lower ends of the length buckets in tokens, longest first."""
        self.skipped: dict[str, str] = {}
        """Measured kernels that cannot be used here -> why."""
        self.told: Callable[[Any], list[Any]] = lambda mine: [mine]
        """What every rank of this picture says, the first rank's first."""

    def bind_layers(self) -> Refusal | None:
        self.rows = self.told(fastest())[0]
        self.buckets = tuple(sorted({row.tokens for row in self.rows}, reverse=True))
        for name in dict.fromkeys(name for row in self.rows for name in row.kernels):
            self._load(name)
        usable = self.told(tuple(self.loaded))
        for name in [name for name in self.loaded if not all(name in names for names in usable)]:
            del self.loaded[name]
            self.skipped[name] = "cannot be used on every rank"
        return None

    def _load(self, name: str) -> None:
        kernel = kernels().get(name)
        reason = "is not known" if kernel is None else kernel.available()
        if kernel is not None and kernel.exactness == "lossy":
            reason = "is lossy"
        if kernel is not None and reason is None:
            try:
                kernel.load()
            except LOAD_ERRORS as error:
                reason = f"is installed and does not load: {error}"
        if kernel is None or reason is not None:
            self.skipped[name] = f"{reason}"
        else:
            self.loaded[name] = kernel

    def bucket(self, tokens: int) -> int:
        """Lower end of the bucket that a length falls into; 0 below the shortest measured. Traced by torch.compile."""
        for lower in self.buckets:
            if tokens >= lower:
                return lower
        return 0

    def decide_anew(self, call: AttentionCall, tokens: int) -> Decision:
        measured = tokens > 0 and call.device == self.device
        row = next((row for row in self.rows if row.fits(call, tokens)), None) if measured else None
        for candidate in row.kernels if row is not None else ():
            kernel = self.loaded.get(candidate)
            if kernel is not None and kernel.refusal(call) is None:
                return candidate, None
        return None, None

    def attention(self, q_BSHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, ctx: AttentionContext) -> Tensor | None:
        if ctx.backend is not None:
            return None
        mask = broadcast_mask(q_BSHD, k_BTHD, ctx.mask)
        kernel = self._kernel(q_BSHD, k_BTHD, v_BTHD, mask, ctx)
        return None if kernel is None else kernel.run(q_BSHD, k_BTHD, v_BTHD, mask, ctx.causal, ctx.scale)

    def attention_with_lse(
        self, q_BSHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, ctx: AttentionContext
    ) -> tuple[Tensor, Tensor] | None:
        if ctx.backend is not None:
            return None
        kernel = self._kernel(q_BSHD, k_BTHD, v_BTHD, None, ctx)
        if kernel is None or not kernel.returns_lse:
            return None
        return kernel.run_with_lse(q_BSHD, k_BTHD, v_BTHD, ctx.scale)

    def _kernel(
        self, q_BSHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, mask: Any, ctx: AttentionContext
    ) -> Kernel | None:
        """The kernel for this call; None leaves it as it is."""
        call = real_call(q_BSHD, k_BTHD, v_BTHD, mask, ctx)
        tokens = self.bucket(min(q_BSHD.shape[1], k_BTHD.shape[1])) if self.buckets else 0
        if torch.compiler.is_compiling():
            name = kernel_while_tracing(self.name, *call, tokens)
        else:
            name = self.decide(call, tokens)[0]
            self.saw(call, ctx)
        return None if name is None else self.loaded[name]

    def report(self) -> dict[str, Any]:
        told: dict[str, Any] = {"layers": len(self.layers)}
        if not self.rows:
            told["table"] = "no measurements for this device: torch's own choice is left"
        left = self.set_in_diffusers()
        if left:
            told["left to the backend set in diffusers"] = left
        if self.skipped:
            told["measured, and not usable here"] = dict(self.skipped)
        chosen: dict[AttentionCall, dict[str, None]] = {}
        for (call, _), (name, _) in self.decided.items():
            chosen.setdefault(call, {})[name or "torch's own choice"] = None
        if chosen:
            told["chosen"] = {self._describe(call): " or ".join(names) for call, names in chosen.items()}
        return told

    def _describe(self, call: AttentionCall) -> str:
        """What kind of call it is, and how many layers made it, or, where compiled, have weights of its shape."""
        kind = f"{word(call.dtype)} {call.heads}×{call.head_dim}{f' {call.mask} mask' if call.mask else ''}"
        assumed = [assumed_call(site.module) for site in self.layers]
        count = len(self.seen.get(call, ())) or sum(
            a is not None and (a.heads, a.head_dim) == (call.heads, call.head_dim) for a in assumed
        )
        return f"{kind} ({count or 'some'} of {len(self.layers)} layers)"


def usable() -> str:
    """The names of the kernels that can be used on this machine."""
    names = [name for name, kernel in kernels().items() if kernel.available() is None]
    return f"usable here: {', '.join(names)}"
