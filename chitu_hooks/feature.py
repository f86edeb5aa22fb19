"""The feature interface: the only thing that kernels, caches and parallelism share with the engine.

A feature overrides the methods it needs; the engine installs only the hooks that some feature overrides and calls the
features in the order of `Feature.order`, outermost first, and for the ``*_out`` methods in reverse::

    generation ── begin ────────────────────────────────────────────────────────────── end
    scheduler.step                                                    step_in, step_out
    denoiser call        denoiser_in ─────────────────────────── denoiser_out
    trunk                      trunk_in ─ front_out ─────── trunk_out
    block                            block_in ───── block_out
    attention layer                     attention_layer
    attention call                         attention
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from .attention import AttentionContext, Frame
    from .call import BlockInputs, Call, StepCall
    from .hook_map import HookMap
    from .sites import BlockSite, Sites
    from .state import Generation, Streams

Exactness = Literal["exact", "close", "lossy"]
"""*exact*: the stock model's bits. *close*: the same mathematics in another order or kernel. *lossy*: other mathematics."""


class Order(enum.IntEnum):
    """Where a feature stands when several run at one seam, outermost first."""

    CLOCK = 0
    GUIDANCE = 10
    CACHE = 20
    CONTEXT = 30
    KERNEL = 40


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a feature cannot be used here, with the numbers, and what would fit."""

    reason: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.reason}; {self.remedy}" if self.remedy else self.reason


class Feature:
    """Base class of everything that attaches to the seams. Every method is optional.

    Attributes:
        name: the word under which reports and errors speak of this feature.
        exactness: what the feature does to the output, see `Exactness`.
        order: its place among the features of one seam, see `Order`.
        skips_trunk: the feature calls `Call.skip_trunk`, so the engine keeps every stack's residual for each branch.
        front, back: blocks at either end of the trunk that a skipped call still computes; a `back` between 0 and 1 is a part
            of them, which leaves at least one block in and one out. Refiners come before the trunk; they are skipped with it
            only when both are 0.
        reuses: what a skipped call gets from the last computed one: `residual`, added to this call's input; or `output`,
            whatever goes in now. `Branch.residuals` holds the one or the other.

    A feature keeps what belongs to one generation or branch in `Generation.memory` and `Branch.memory`, never on
    itself: the engine drops those when the generation ends, however it ends.
    """

    name: str = "feature"
    exactness: Exactness = "exact"
    order: Order = Order.CACHE
    skips_trunk: bool = False
    front: int = 0
    back: int | float = 0
    reuses: Literal["residual", "output"] = "residual"

    def bind(self, sites: Sites, hook_map: HookMap) -> Refusal | None:
        """First gate, at patch time: what modules and configuration tell. Nothing is hooked yet."""
        return None

    def begin(self, generation: Generation) -> None:
        """A ``pipe(...)`` call starts; steps and shapes are not known yet."""

    def step_in(self, step: StepCall) -> None:
        """Before ``scheduler.step``; may replace `step.model_output` and `step.sample`."""

    def step_out(self, step: StepCall) -> None:
        """After ``scheduler.step``; may replace `step.result`."""

    def denoiser_in(self, call: Call) -> Any | None:
        """Before the denoiser runs; may change `call.args` and `call.kwargs`, or call `call.skip_trunk()`.

        Returns:
            None to let the denoiser run, or the sample that stands for its output: then nothing of it runs.
        """
        return None

    def denoiser_out(self, call: Call) -> None:
        """After the denoiser ran or was replaced; may replace `call.sample`.

        Where a feature further out replaced the call (`call.replaced`), this comes without `denoiser_in` before it.
        """

    def trunk_in(self, call: Call, streams: Streams) -> Streams | None:
        """At the entry of the first block called: role -> (B, S, C) tensor. May return other streams."""
        return None

    def front_out(self, call: Call, residual: Streams) -> None:
        """After the first `front` blocks, in every call; may call ``call.skip_trunk()`` for those that follow.

        Args:
            call: the denoiser call.
            residual: role -> (B, S, C) tensor, what these blocks added; where they reach into a second stack, what the
                blocks of that stack added.
        """

    def trunk_out(self, call: Call, streams: Streams) -> Streams | None:
        """At the exit of the last block called, or of the trunk if the map has an `exit`: role -> (B, S, C) tensor.

        May return other streams.
        """
        return None

    def block_in(self, call: Call, block: BlockSite, inputs: BlockInputs) -> Streams | None:
        """Before a block; may change `inputs`, or return the streams that stand for its output: it is then not run."""
        return None

    def block_out(self, call: Call, block: BlockSite, outputs: Streams) -> Streams | None:
        """After a block that ran or was replaced by `block_in`; may return other streams."""
        return None

    def attention_layer(self, frame: Frame, rest: Callable[[], Any]) -> Any | None:
        """In place of one whole layer, projections included; traced code does not come here.

        Args:
            frame: what went into the layer's processor, and which layer it is.
            rest: runs the layer, with `attention` of every feature.

        Returns:
            What the processor returns, or None to let the layer run.
        """
        return None

    def attention(
        self, q_BSHD: torch.Tensor, k_BTHD: torch.Tensor, v_BTHD: torch.Tensor, ctx: AttentionContext
    ) -> torch.Tensor | None:
        """In place of one attention call. This code is traced by torch.compile: it reads no state that changes.

        Args:
            q_BSHD: queries, (batch, query tokens, heads, head dim).
            k_BTHD: keys, (batch, key tokens, heads or key heads, head dim).
            v_BTHD: values, shaped like the keys.
            ctx: mask, scale and origin of the call; `ctx.next(q, k, v)` runs the features further in, then the
                original call.

        Returns:
            The (B, S, H, D) output, or None to leave the call as it is, bit for bit.
        """
        return None

    def attention_with_lse(
        self, q_BSHD: torch.Tensor, k_BTHD: torch.Tensor, v_BTHD: torch.Tensor, ctx: AttentionContext
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """`attention` on a part of the keys, for a feature further out that puts the parts together. Without a mask.

        Returns:
            The (B, S, H, D) output and the float32 (B, H, S) log of the sums of exp(scale q·k), or None to leave the part
            to features further in. A feature that overrides `attention` and not this is refused where parts are asked for.
        """
        return None

    def end(self, generation: Generation) -> None:
        """The generation is over, by success, exception or interrupt."""

    def report(self) -> dict[str, Any]:
        """What to tell about this feature in `Handle.report`: plain data, small."""
        return {}


SEAM_METHODS: dict[str, tuple[str, ...]] = {
    "clock": ("begin", "step_in", "step_out", "end"),
    "denoiser": ("denoiser_in", "denoiser_out"),
    "block": ("trunk_in", "front_out", "trunk_out", "block_in", "block_out"),
    "attention": ("attention_layer", "attention", "attention_with_lse"),
}
"""Which methods hang on which seam."""


def overrides(feature: Feature, method: str) -> bool:
    """Whether `feature` has its own version of `method`, so that the engine has to call it."""
    return getattr(type(feature), method) is not getattr(Feature, method) or method in vars(feature)


def needs_seam(feature: Feature, seam: str) -> bool:
    """Whether any hook of `seam` has to be installed for `feature`."""
    if feature.skips_trunk and seam in ("denoiser", "block"):
        return True
    return any(overrides(feature, method) for method in SEAM_METHODS[seam])
