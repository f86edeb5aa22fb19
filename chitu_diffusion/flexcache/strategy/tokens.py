"""What strategies share that compute some of the image tokens and freeze the others."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, ClassVar

from torch import Tensor

from chitu_hooks import (
    AttentionContext,
    BlockInputs,
    Branch,
    Call,
    Feature,
    GenerationError,
    HookMap,
    Refusal,
    Sites,
    Streams,
)
from chitu_hooks.branches import signature
from chitu_hooks.call import map_tensors
from chitu_hooks.sites import BlockSite
from chitu_hooks.state import ACTIVE
from chitu_hooks.tokens import refuse_cutting

from ..fewer import changing, cut_added, cuts, fewer, filled, image_part, main_role, order_of
from ..frozen import Fill, frozen_keys, keep
from ..limits import Params
from .base import Strategy
from .checks import refuse_attention


class TokenStrategy(Strategy):
    """In the calls that `wants` chooses, runs the trunk on the image tokens at ``self.memory(branch).places``.

    A subclass writes `wants`, which sets `places`, and `watch`. Fresh tokens attend to the kept keys and values of the frozen
    ones, and a frozen token leaves the trunk as what enters it plus what the trunk added when it was last computed.
    """

    decides = "nowhere else"
    skips_trunk = False
    cuts_tokens = True
    start: ClassVar[dict[str, Any]] = {
        "places": None,
        "few": None,
        "cuts": None,
        "entry": None,
        "residual": None,
        "signature": None,
    }

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.off = self.full_budget
        self._fill = Fill()
        self._features: tuple[tuple[Feature, ...], ...] = ((), ())
        """Those of the attention seam, and the same with `Fill` in this one's place."""

    def watch(self, call: Call, image: Tensor) -> None:
        """After every trunk that computed all tokens: (B, S, C), the image tokens that leave it."""

    def bind(self, sites: Sites, hook_map: HookMap) -> Refusal | None:
        self.trunk_arguments = hook_map.trunk_arguments
        instead = "use static, fbcache or taylorseer"
        refusal = refuse_cutting(sites, hook_map, instead) or refuse_attention(sites, instead)
        return refusal or super().bind(sites, hook_map)

    def memory(self, branch: Branch) -> SimpleNamespace:
        memory = super().memory(branch)
        memory.keys = frozen_keys(branch)
        return memory

    def possible(self, call: Call) -> bool:
        memory = self.memory(call.branch)
        return bool(memory.keys.kept) and memory.signature == signature(call)

    def learn(self, call: Call) -> None:
        self.memory(call.branch).signature = signature(call)

    def freezes(self, call: Call) -> bool:
        """Whether `call` runs on fewer tokens."""
        return call.attention is self._features[1]

    # -- the trunk -------------------------------------------------------------------------------------------------

    def denoiser_in(self, call: Call) -> Any | None:
        super().denoiser_in(call)
        memory = self.memory(call.branch)
        memory.keys.open, memory.few = False, None
        memory.keys.keeping = call.step.position + 1 >= self.params.warmup
        if self.off or not self.decide(call):
            return None
        for name in self.trunk_arguments:
            value = call.argument(name)
            if value is not None:
                cut = cut_added(name, memory.places, memory.residual.shape[1])
                call.set_argument(name, map_tensors(value, cut))
        if self._features[0] is not call.attention:
            features = call.attention or ()
            self._features = features, tuple(self._fill if feature is self else feature for feature in features)
        call.attention = self._features[1]
        return None

    def trunk_in(self, call: Call, streams: Streams) -> Streams | None:
        memory, role = self.memory(call.branch), main_role(streams)
        memory.keys.open = True
        if not self.freezes(call):
            memory.entry = None if self.off else streams[role].clone()  # a block may work in place on its input
            return None
        memory.entry = streams[role]
        memory.few = few = fewer(changing(memory.places, 0), streams, order_of(call.denoiser))
        memory.cuts, ACTIVE.layout = cuts(few), few
        self.ledger.reused += 1
        call.generation.fewer.setdefault((call.denoiser.name, call.branch.name), Counter())[len(few.image)] += 1
        return {**streams, role: streams[role].index_select(1, few.image)}

    def block_in(self, call: Call, block: BlockSite, inputs: BlockInputs) -> None:
        memory = self.memory(call.branch)
        if memory.few is not None:
            memory.cuts.apply(inputs)
            streams = inputs.streams()
            changing(streams[main_role(streams)], 1)

    def trunk_out(self, call: Call, streams: Streams) -> Streams | None:
        memory, role = self.memory(call.branch), main_role(streams)
        few, entry, memory.keys.open = memory.few, memory.entry, False
        ACTIVE.layout = memory.few = memory.cuts = memory.entry = None
        if entry is None:
            return None
        out = streams[role] if few is None else filled(streams[role], few, entry + memory.residual)
        image = image_part(out, entry.shape[1], order_of(call.denoiser)[0] == "text")
        memory.residual = image - entry
        if few is None:
            self.watch(call, image)
            return None
        return {**streams, role: out}

    def denoiser_out(self, call: Call) -> None:
        if self.memory(call.branch).keys.open:
            raise GenerationError(
                f"{self.name}: {call.denoiser.name} left its trunk at a place that its hook map does not name"
            )
        if self.freezes(call):
            call.generation.measure_held()
        else:
            super().denoiser_out(call)

    def attention(self, q_BSHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, ctx: AttentionContext) -> Tensor | None:
        if self.off or ctx.site is None or ctx.kind(q_BSHD.shape[1], k_BTHD.shape[1]) == "cross":
            return None
        keep(ctx.site.layer, ctx.part, k_BTHD, v_BTHD)
        return ctx.next(q_BSHD, k_BTHD, v_BTHD)
