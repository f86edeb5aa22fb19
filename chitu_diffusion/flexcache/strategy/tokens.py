"""What strategies share that compute some of the image tokens and freeze the others."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
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
from chitu_hooks.streams import cloned
from chitu_hooks.tokens import refuse_cutting

from ..fewer import changing, cut_added, cuts, fewer, filled, image_part, main_role, order_of, with_image
from ..frozen import Fill, frozen_keys, keep, keep_now
from ..limits import Params
from .base import Strategy
from .checks import refuse_attention


class TokenStrategy(Strategy):
    """In the calls that `wants` chooses, runs the trunk on the image tokens at ``self.memory(branch).places``.

    A subclass writes `wants`, which sets `places`, and `watch`. Fresh tokens attend to the kept keys and values of the frozen
    ones, and a frozen token leaves the trunk as what enters it plus what the trunk would add by the line through the last two
    times that it was computed, of whose rise `damping` is taken. Where `places` is None all are frozen, and no block runs.
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
        "rise": None,
        "at": None,
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
            if value is not None and memory.places is not None:
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
        self.ledger.reused += 1
        if memory.places is None:  # what is handed on may be written into
            return cloned(streams)
        memory.few = few = fewer(changing(memory.places, 0), streams, order_of(call.denoiser))
        memory.cuts, ACTIVE.layout = cuts(few), few
        call.generation.fewer.setdefault((call.denoiser.name, call.branch.name), Counter())[len(few.image)] += 1
        return {**streams, role: streams[role].index_select(1, few.image)}

    def block_in(self, call: Call, block: BlockSite, inputs: BlockInputs) -> Streams | None:
        memory = self.memory(call.branch)
        if memory.few is not None:
            memory.cuts.apply(inputs)
            streams = inputs.streams()
            changing(streams[main_role(streams)], 1)
        elif memory.keys.open and self.freezes(call):
            left_out = call.generation.left_out.setdefault((call.denoiser.name, call.branch.name), Counter())
            left_out[block.path] += 1
            return inputs.streams()
        return None

    def trunk_out(self, call: Call, streams: Streams) -> Streams | None:
        memory, role = self.memory(call.branch), main_role(streams)
        few, entry, memory.keys.open = memory.few, memory.entry, False
        ACTIVE.layout = memory.few = memory.cuts = memory.entry = None
        if entry is None:
            return None
        text_first, index = order_of(call.denoiser)[0] == "text", call.step.index
        if not self.freezes(call):
            image = image_part(streams[role], entry.shape[1], text_first)
            self._learn_all(memory, image - entry, index)
            self.watch(call, image)
            return None
        stale = entry + self._ahead(memory, index)
        if few is None:
            return {**streams, role: with_image(streams[role], entry.shape[1], stale, text_first)}
        image = image_part(streams[role], len(few.image), text_first)
        self._learn_some(memory, image - entry.index_select(1, few.image), few.image, index)
        return {**streams, role: filled(streams[role], few, stale)}

    # -- what the trunk adds to each token ---------------------------------------------------------------------------

    def _ahead(self, memory: SimpleNamespace, index: int) -> Tensor:
        """What it would add at step `index`, (B, S, C)."""
        if memory.rise is None or not self.damping:
            return memory.residual
        return memory.residual + memory.rise * (self.damping * (index - memory.at)).to(memory.rise.dtype)

    def _learn_all(self, memory: SimpleNamespace, residual: Tensor, index: int) -> None:
        same = memory.residual is not None and memory.residual.shape == residual.shape
        memory.rise = _rise(residual, memory.residual, index - memory.at) if same else None
        memory.residual = residual
        memory.at = torch.full((residual.shape[1], 1), index, device=residual.device)

    def _learn_some(self, memory: SimpleNamespace, residual: Tensor, places: Tensor, index: int) -> None:
        if memory.rise is not None:
            before, at = memory.residual.index_select(1, places), memory.at.index_select(0, places)
            memory.rise = memory.rise.index_copy(1, places, _rise(residual, before, index - at))
        memory.residual = memory.residual.index_copy(1, places, residual)
        memory.at = memory.at.index_fill(0, places, index)

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
        keeping = keep if torch.compiler.is_compiling() else keep_now
        keeping(ctx.site.layer, ctx.part, k_BTHD, v_BTHD)
        return ctx.next(q_BSHD, k_BTHD, v_BTHD)


def _rise(now: Tensor, before: Tensor, steps: Tensor) -> Tensor:
    """What each token's residual (B, S, C) rises by in a step; a step that is taken twice counts as one."""
    return (now - before) / steps.clamp(min=1).to(now.dtype)
