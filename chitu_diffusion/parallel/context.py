"""Context parallelism: the tokens of one denoiser call spread over ranks.

Tokens are cut at the trunk's entry, and with them, at every block, the arguments that the hook map names as aligned.
Attention exchanges what it needs; everything else of a block works on each token alone. At the exit the tokens are gathered.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from chitu_hooks import (
    AttentionContext,
    BlockInputs,
    Call,
    Feature,
    Generation,
    GenerationError,
    HookMap,
    Order,
    Refusal,
    Sites,
    Streams,
)
from chitu_hooks.call import map_tensors
from chitu_hooks.hook_map import ROLES
from chitu_hooks.sites import AttentionSite, BlockSite
from chitu_hooks.state import ACTIVE
from chitu_hooks.tokens import AlignedCuts, refuse_cutting

from . import exchange
from .collectives import all_gather_dim, split
from .layout import Layout, cut, cut_role, make_layout, tokens_of
from .masks import key_mask, received_mask
from .mesh import Mesh
from .overlap import bytes_sent, groups_for
from .params import Parallel


class ContextParallel(Feature):
    """Ulysses, ring, all-gather of keys and values, or Ulysses inside one of the other two.

    Args:
        parallel: the degrees.
        mesh: the ranks.
    """

    name = "context parallel"
    exactness = "close"
    order = Order.CONTEXT

    def __init__(self, parallel: Parallel, mesh: Mesh) -> None:
        self.parallel = parallel
        self.axis = mesh.context
        # Read by traced code: plain numbers and words.
        self.group = mesh.context.name
        self.ulysses = parallel.ulysses
        self.ulysses_group = mesh.ulysses.name
        self.ulysses_index = mesh.ulysses.index
        self.outer = parallel.outer
        self.outer_group = mesh.outer.name
        self.outer_index = mesh.outer.index
        self.rings = parallel.ring > 1
        self.heads: set[int] = set()
        """Numbers of heads and of key heads that a rank attends with, of the layers that tell."""
        self.key_share = 1.0
        """Key heads over heads, the least of those layers."""
        self.trunk_arguments: tuple[str, ...] = ()
        self.calls = 0
        self.seen: dict[str, None] = {}

    # -- first gate ------------------------------------------------------------------------------------------------

    def bind(self, sites: Sites, hook_map: HookMap) -> Refusal | None:
        self.trunk_arguments = tuple(hook_map.trunk_arguments)
        refusal = refuse_cutting(sites, hook_map, "use cfg parallelism only")
        if refusal is not None:
            return refusal
        for site in sites.attention:
            refusal = self._refuse_attention(site)
            if refusal is not None:
                return refusal
        return None

    def _refuse_attention(self, site: AttentionSite) -> Refusal | None:
        if getattr(getattr(site.module, "processor", None), "_parallel_config", None) is not None:
            return Refusal(f"{site.path}: diffusers' own context parallelism is on", "disable it, then patch")
        if site.stack is None or site.stack.refiner:
            return None
        if not site.reachable:
            return Refusal(
                f"{site.path}: what {type(site.module.processor).__name__} computes cannot be intercepted, so tokens on "
                "other ranks would be left out",
                "use cfg parallelism only",
            )
        heads = getattr(site.module, "heads", None)
        if isinstance(heads, int) and heads % self.ulysses:
            fit = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
            return Refusal(
                f"{site.path} has {heads} heads, which ulysses={self.ulysses} does not divide",
                f"degrees that fit: {fit}; gather={self.ulysses} takes any number of heads",
            )
        return self._refuse_groups(site, heads)

    def _refuse_groups(self, site: AttentionSite, heads: Any) -> Refusal | None:
        if not isinstance(heads, int):
            return None
        keys = key_heads(site.module, heads)
        self.key_share = min(self.key_share, keys / heads)
        here = {count // self.ulysses for count in (heads, keys)}
        self.heads |= here
        wished = self.parallel.overlap
        common = math.gcd(*here)
        if wished == "auto" or common % wished == 0:
            return None
        fit = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
        return Refusal(
            f"{site.path} attends with {' on '.join(map(str, sorted(here, reverse=True)))} heads on each rank, which "
            f"overlap={wished} does not divide",
            f"head groups that fit: {fit}",
        )

    def begin(self, generation: Generation) -> None:
        self.calls = 0
        self.seen = {}

    # -- the trunk -------------------------------------------------------------------------------------------------

    def denoiser_in(self, call: Call) -> None:
        """Cut what the model adds to its streams between blocks."""
        memory = call.generation.memory(self)
        memory.added = set()

        def cut_tokens(tensor: Tensor) -> Tensor:
            memory.added.add(tensor.shape[1])
            return cut(tensor, 1, split(tensor.shape[1], self.axis.size), self.axis.index)

        for name in self.trunk_arguments:
            value = call.argument(name)
            if value is not None:
                call.set_argument(name, map_tensors(value, cut_tokens))

    def trunk_in(self, call: Call, streams: Streams) -> Streams:
        order = next(
            (stack.order for stack in call.denoiser.stacks if not stack.refiner and stack.order), ("text", "image")
        )
        layout = make_layout(streams, self.axis.index, self.axis.size, self.parallel.text, order)
        if layout.shared and (self.rings or (self.ulysses > 1 and self.outer > 1)):
            raise GenerationError(
                f"context parallel: {self.parallel} spreads text over its ranks, which text='replicate' forbids and "
                f"{layout.text[0]} text tokens on {self.axis.size} ranks may be too few for; ulysses or gather alone keep it whole"
            )
        layout = layout._replace(groups=self._groups(layout, streams))
        ACTIVE.layout = layout
        self.calls += 1
        self.seen[_told(layout)] = None
        memory = call.generation.memory(self)
        memory.cuts = AlignedCuts(
            {role: tokens_of(role, layout) for role in ROLES},
            lambda tensor, dim, role: cut_role(tensor, dim, role, layout),
        )
        memory.open = True
        if memory.added - {sum(layout.image)}:
            raise GenerationError(
                f"context parallel: what is added to the trunk has {sorted(memory.added)} tokens, and the trunk "
                f"{sum(layout.image)}; correct trunk_arguments in the hook map"
            )
        packed = not any(layout.text)
        return {
            role: None if tensor is None else _apart(cut_role(tensor, 1, "image" if packed else role, layout))
            for role, tensor in streams.items()
        }

    def _groups(self, layout: Layout, streams: Streams) -> int:
        """Head groups for this trunk: by sizes that are the same on every rank, as the exchanges have to be."""
        if self.parallel.overlap != "auto":
            return self.parallel.overlap
        if not self.parallel.overlaps or not self.heads:
            return 1
        main: Any = streams.get("image", streams.get("joint"))
        tokens = main.shape[0] * tokens_of("joint", layout)
        row = main.shape[2] * main.element_size()
        sent = bytes_sent(tokens, row, round(row * self.key_share), self.ulysses, self.parallel.gather)
        return groups_for(sent, self.heads)

    def block_in(self, call: Call, block: BlockSite, inputs: BlockInputs) -> None:
        if ACTIVE.layout is not None:
            call.generation.memory(self).cuts.apply(inputs)

    def trunk_out(self, call: Call, streams: Streams) -> Streams | None:
        layout = ACTIVE.layout
        if layout is None:
            return None
        ACTIVE.layout = None
        memory = call.generation.memory(self)
        memory.cuts, memory.open = None, False
        return {role: None if tensor is None else self._whole(tensor, role, layout) for role, tensor in streams.items()}

    def _whole(self, tensor: Tensor, role: str, layout: Layout) -> Tensor:
        """All tokens of a stream, in the model's order."""
        if role == "text":
            return tensor if layout.shared else all_gather_dim(tensor, 1, layout.text, self.group)
        text = layout.text[layout.rank]
        if role == "image" or not any(layout.text):
            return all_gather_dim(tensor, 1, layout.image, self.group)
        at = text if layout.text_first else layout.image[layout.rank]
        first, second = tensor[:, :at], tensor[:, at:]
        roles = ("text", "image") if layout.text_first else ("image", "text")
        return torch.cat([self._whole(first, roles[0], layout), self._whole(second, roles[1], layout)], 1)

    def denoiser_out(self, call: Call) -> None:
        if getattr(call.generation.memory(self), "open", False):
            raise GenerationError(
                f"context parallel: {call.denoiser.name} left its trunk without its tokens being gathered"
            )

    def summed(self, sums: Tensor) -> Tensor:
        """`sums` over the shares of all ranks: what a cache measures on its share becomes the same number on every rank."""
        dist.all_reduce(sums, group=self.axis.group)
        return sums

    # -- attention, traced -----------------------------------------------------------------------------------------

    def attention(self, q_BSHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, ctx: AttentionContext) -> Tensor | None:
        layout = ACTIVE.layout
        if layout is None:
            return None
        s = q_BSHD.shape[1]
        if ctx.kind(s, k_BTHD.shape[1]) == "cross":
            return None  # every rank has all the keys
        if ctx.causal or k_BTHD.shape[1] != s:
            raise GenerationError(
                f"{ctx.layer}: context parallel cannot spread attention of {s} queries on {k_BTHD.shape[1]} keys"
                f"{', causal' if ctx.causal else ''}"
            )
        sizes, shared = layout.image, False
        if s != layout.image[layout.rank]:
            sizes, shared = tuple(a + b for a, b in zip(layout.text, layout.image)), layout.shared
        if s != sizes[layout.rank]:
            raise GenerationError(
                f"{ctx.layer}: attention over {s} tokens, where this rank has {layout.image[layout.rank]} image and "
                f"{layout.text[layout.rank]} text tokens"
            )
        whole = ctx.mask
        if whole is not None and self.rings:
            raise GenerationError(
                f"{ctx.layer}: ring attention is put together from parts without a mask, and this call has one of shape "
                f"{tuple(whole.shape)}; use ulysses={self.axis.size} or gather={self.axis.size}"
            )
        if whole is not None:
            mask = received_mask(key_mask(whole, q_BSHD.shape[0], s), sizes, layout, self.group)
            ctx.mask = self._mask_of_heads(mask)
        try:
            return self._exchanged(q_BSHD, k_BTHD, v_BTHD, ctx, layout, sizes, shared)
        finally:
            ctx.mask = whole

    def _exchanged(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        ctx: AttentionContext,
        layout: Layout,
        sizes: tuple[int, ...],
        shared: bool,
    ) -> Tensor:
        text = layout.text[layout.rank]
        if self.ulysses > 1 and (q.shape[2] % self.ulysses or k.shape[2] % self.ulysses):
            raise GenerationError(
                f"{ctx.layer}: {q.shape[2]} heads on {k.shape[2]} key heads, which ulysses={self.ulysses} does not divide; "
                "gather takes any number"
            )
        groups = self._groups_of(q, k, ctx, layout)
        if shared and self.outer == 1:
            return exchange.ulysses_shared(
                q, k, v, layout.image, layout.rank, text, layout.text_first, self.group, ctx.next, groups
            )
        if shared:
            return exchange.gather_shared(q, k, v, layout.image, text, layout.text_first, self.group, ctx.next, groups)
        if self.outer == 1:
            return exchange.ulysses(q, k, v, sizes, self.group, ctx.next, groups)
        if self.ulysses == 1:
            return self._outer(q, k, v, sizes, ctx, groups)
        U = self.ulysses
        chunks = tuple(sum(sizes[place * U : place * U + U]) for place in range(self.outer))
        mine = sizes[self.outer_index * U : self.outer_index * U + U]

        def inner(q_BShD: Tensor, k_BSgD: Tensor, v_BSgD: Tensor) -> Tensor:
            return self._outer(q_BShD, k_BSgD, v_BSgD, chunks, ctx)

        return exchange.ulysses(q, k, v, mine, self.ulysses_group, inner)

    def _groups_of(self, q: Tensor, k: Tensor, ctx: AttentionContext, layout: Layout) -> int:
        """Head groups for this layer: those of the trunk, or with auto one where they do not fit."""
        if layout.groups == 1:
            return 1
        apart = ctx.mask is not None and ctx.mask.shape[1] > 1  # `ctx` has one mask for all groups
        divides = all(tensor.shape[2] // self.ulysses % layout.groups == 0 for tensor in (q, k))
        if divides and not apart:
            return layout.groups
        if self.parallel.overlap == "auto":
            return 1
        heads = f"{q.shape[2]} heads on {k.shape[2]} key heads over ulysses={self.ulysses}"
        raise GenerationError(
            f"{ctx.layer}: overlap={layout.groups} does not divide {'a mask that differs between heads' if apart else heads}; "
            "use overlap=1"
        )

    def _outer(
        self, q: Tensor, k: Tensor, v: Tensor, sizes: tuple[int, ...], ctx: AttentionContext, groups: int = 1
    ) -> Tensor:
        """Ring, or gathered keys and values, over the outer axis."""
        if self.rings:
            return exchange.ring(q, k, v, sizes, self.outer_index, self.outer_group, ctx.next_with_lse)
        return exchange.gather(q, k, v, sizes, self.outer_group, ctx.next, groups)

    def _mask_of_heads(self, mask: Tensor) -> Tensor:
        """The rows of a mask that differs between heads which belong to this rank's heads."""
        if mask.shape[1] == 1 or self.ulysses == 1:
            return mask
        return mask.chunk(self.ulysses, 1)[self.ulysses_index]

    def report(self) -> dict[str, Any]:
        told: dict[str, Any] = {"ranks": str(self.parallel), "calls spread": self.calls}
        if self.seen:
            told["tokens of each rank"] = " or ".join(list(self.seen)[:4])
        return told


def _apart(tensor: Tensor) -> Tensor:
    """A share of the tokens in memory of its own. The strides of a view would be a graph of their own for the first block:
    torch.compile looks at them, also where the dimension has one entry and `contiguous` copies nothing."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _told(layout: Layout) -> str:
    words = f", {_numbers(layout.text)} text{' on every rank' if layout.shared else ''}" if any(layout.text) else ""
    groups = f", heads in {layout.groups} groups" if layout.groups > 1 else ""
    return f"{_numbers(layout.image)} {'image' if words else 'tokens'}{words}{groups}"


def key_heads(module: Any, heads: int) -> int:
    """Key heads of an attention layer, by the width of its projections; as many as heads where they do not tell."""
    inner, keys = getattr(module, "inner_dim", None), getattr(module, "inner_kv_dim", None)
    return heads * keys // inner if isinstance(inner, int) and isinstance(keys, int) and inner else heads


def _numbers(sizes: tuple[int, ...]) -> str:
    return str(sizes[0]) if len(set(sizes)) == 1 else f"{sizes[0]} or {sizes[-1]}"
