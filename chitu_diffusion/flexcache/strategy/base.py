"""What every step-level strategy shares: the decision, the skip, and the books."""

from __future__ import annotations

import warnings
from typing import Any

from chitu_hooks import Call, ChituWarning, Feature, Generation, HookMap, Order, Refusal, Sites

from ..flops import Ledger
from ..params import Params

DIFFUSERS_CACHES = (
    "fbc_",
    "mag_cache",
    "pyramid_attention",
    "taylorseer",
    "faster_cache",
    "sea_cache",
    "text_kv_cache",
)
"""How the names begin under which diffusers 0.42 registers the hooks of its caches, also by ``apply_…(transformer)``."""


class Strategy(Feature):
    """Skips the trunk where `wants` says so and a residual is there.

    A subclass writes `wants`. State that belongs to a branch goes to ``call.branch.memory(self)``.
    """

    exactness = "lossy"
    order = Order.CACHE
    skips_trunk = True

    def __init__(self, params: Params) -> None:
        self.params = params
        self.name = params.strategy
        self.ledger = Ledger()

    def wants(self, call: Call) -> bool:
        """Whether the policy would skip the trunk in this call. Every rank has to come to the same answer."""
        raise NotImplementedError

    def bind(self, sites: Sites, hook_map: HookMap) -> Refusal | None:
        """Refuse where diffusers' own cache is on: two caches would skip each other's work."""
        for denoiser in sites.denoisers:
            if getattr(denoiser.inner, "is_cache_enabled", False):
                return Refusal(
                    f"{denoiser.name} has diffusers' own cache enabled", f"call {denoiser.name}.disable_cache() first"
                )
            for path, module in denoiser.inner.named_modules():
                for name in getattr(getattr(module, "_diffusers_hook", None), "hooks", ()):
                    if name.startswith(DIFFUSERS_CACHES):
                        return Refusal(
                            f"{denoiser.name}.{path} carries {name!r}, a cache of diffusers",
                            "take it off, or load the pipeline anew",
                        )
        return None

    def begin(self, generation: Generation) -> None:
        self.ledger.begin()

    def denoiser_in(self, call: Call) -> None:
        self.ledger.see(call)
        if not self.wants(call):
            return
        self.ledger.wanted += 1
        if call.can_skip:
            call.skip_trunk()
        elif call.branch.computed:
            why = (
                "the shapes or the presence of the denoiser's arguments changed since the last computed step"
                if call.branch.skippable
                else "the last computed step left no residual for some stack"
            )
            call.generation.note(
                f"{self.name}: {call.branch.name} computed position {call.step.position} although a skip was due: {why}"
            )

    def end(self, generation: Generation) -> None:
        self.ledger.close(generation)
        if self.ledger.wanted and not self.ledger.skipped and generation.steps_done:
            warnings.warn(
                f"{self.name}: {self.ledger.wanted} skips were due and none happened", ChituWarning, stacklevel=2
            )
        elif not generation.steps_done and any(calls["computed"] > 1 for calls in generation.tally.values()):
            warnings.warn(
                f"{self.name}: the pipeline took no step of its scheduler, so every call counted as position 0 and was "
                "computed",
                ChituWarning,
                stacklevel=2,
            )

    def report(self) -> dict[str, Any]:
        return {"params": _plain(self.params), **self.ledger.report()}


def _plain(params: Params) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(params).items()}
