"""`pab`: in the middle of a run, attention is computed at one step in a few and broadcast to the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from chitu_hooks import AttentionContext, Call, Feature, HookMap, Refusal, Sites
from chitu_hooks.attention import Frame
from chitu_hooks.call import map_tensors
from chitu_hooks.sites import AttentionSite
from chitu_hooks.state import ACTIVE

from ..kept import Recall, has_parts, keep, only_attends, outputs, turn
from ..params import PAB
from .base import Strategy

KINDS: dict[str, tuple[str, ...]] = {
    "self": ("self", "joint"),
    "cross": ("cross",),
    "all": ("self", "joint", "cross"),
}
"""Value of `PAB.kinds` -> kinds of attention, see `AttentionContext.kind`."""


class PABStrategy(Strategy):
    """Keeps the output of every attention that the seam reaches, and recalls it at the steps between.

    Where all kinds are meant, a layer that does nothing but attention is left out as a whole.
    """

    params: PAB
    decides = "nowhere else"
    skips_trunk = False
    start: ClassVar[dict[str, Any]] = {"outputs": None, "work": None, "turns": None, "signature": None}

    def __init__(self, params: PAB) -> None:
        super().__init__(params)
        self.kinds = () if self.full_budget else KINDS[params.kinds]
        self._recall = Recall(self.kinds)
        self._features: tuple[tuple[Feature, ...], ...] = ((), ())
        """Those of the seam, and the same with `Recall` in this one's place."""
        self._whole: frozenset[AttentionSite] = frozenset()

    def bind(self, sites: Sites, hook_map: HookMap) -> Refusal | None:
        if not any(site.reachable for site in sites.attention):
            return Refusal("no attention of this model is in reach of the seam", "use static or fbcache")
        if self.kinds == KINDS["all"]:
            self._whole = frozenset(site for site in sites.attention if only_attends(site))
        return super().bind(sites, hook_map)

    def denoiser_in(self, call: Call) -> Any | None:
        super().denoiser_in(call)
        memory = self.memory(call.branch)
        if memory.outputs is None:
            memory.outputs, memory.work = {}, {}
        memory.turns = Counter()
        if self.decide(call):
            self.ledger.reused += 1
            call.attention = self._reuse(call.attention or ())
        return None

    def _reuse(self, features: tuple[Feature, ...]) -> tuple[Feature, ...]:
        if self._features[0] is not features:
            self._features = features, tuple(self._recall if feature is self else feature for feature in features)
        return self._features[1]

    def attention_layer(self, frame: Frame, rest: Callable[[], Any]) -> Any | None:
        if not self._keeps_whole(frame.site):
            return None
        result = rest()
        outputs()[turn(frame.site.path)] = map_tensors(result, torch.Tensor.clone)  # type: ignore[union-attr]
        return result

    def _keeps_whole(self, site: AttentionSite | None) -> bool:
        return site in self._whole and not has_parts(site)

    def attention(
        self, q_BSHD: torch.Tensor, k_BTHD: torch.Tensor, v_BTHD: torch.Tensor, ctx: AttentionContext
    ) -> torch.Tensor | None:
        queries, keys = q_BSHD.shape[1], k_BTHD.shape[1]
        if ctx.site is None or ctx.frame is None or (kind := ctx.kind(queries, keys)) not in self.kinds:
            return None
        if not torch.compiler.is_compiling() and self._keeps_whole(ctx.site):
            return None
        out = ctx.next(q_BSHD, k_BTHD, v_BTHD)
        layout = ACTIVE.layout
        if layout is not None:  # the books are of whole calls, also where this rank has a share of the tokens
            queries, keys = layout.whole(queries), keys if kind == "cross" else layout.whole(keys)
        keep(ctx.site.layer, ctx.part, out, queries * keys)
        return out

    def possible(self, call: Call) -> bool:
        memory = self.memory(call.branch)
        return bool(memory.outputs) and memory.signature == call.signature

    def wants(self, call: Call) -> bool:
        steps, position = call.generation.num_steps, call.step.position
        if steps is None:
            return False
        first, stop = round(self.params.begin * steps), round(self.params.end * steps)
        return first <= position < stop and (position - first) % self.params.interval != 0

    def learn(self, call: Call) -> None:
        self.memory(call.branch).signature = call.signature

    @property
    def full_budget(self) -> bool:
        return self.params.interval == 1 or self.params.begin >= self.params.end
