"""The attention seam: what runs in place of diffusers' dispatcher and of torch's function, and what features see of a call.

`processors` puts these functions into the processors' globals. Which features run is read from `ACTIVE.attention`, which
is set only inside a hooked denoiser call: a sibling pipeline that shares the transformer runs the stock call, and
torch.compile sees two graphs at most. Everything here is traced; it was tried with ``fullgraph=True``.

Shape legend: B batch, S query tokens, T key tokens, H heads, D head dim.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as torch_functional
from diffusers.models.attention_dispatch import dispatch_attention_fn

from .errors import GenerationError
from .feature import Feature
from .state import ACTIVE

if TYPE_CHECKING:
    from .sites import AttentionSite


class Frame:
    """The processor call around an attention call: which tokens went in, and where it is."""

    __slots__ = ("calls", "encoder_hidden_states", "hidden_states", "site")

    def __init__(self, hidden_states: Any, encoder_hidden_states: Any, site: AttentionSite | None) -> None:
        self.hidden_states = hidden_states
        self.encoder_hidden_states = encoder_hidden_states
        self.site = site
        self.calls = 0
        """Attention calls so far: an image prompt is attended to by a second one."""


class AttentionContext:
    """Everything about one attention call except q, k and v.

    Attributes:
        mask: boolean or additive mask that broadcasts to (B, H, S, T), or None.
        causal, scale, gqa, dropout: as in `torch.nn.functional.scaled_dot_product_attention`.
        backend: diffusers' backend that the user set on this processor, or None.
        native_parallel: diffusers' own parallel configuration of this processor, or None.
        extra: further keyword arguments for diffusers' dispatcher.
        site: the layer, with its path, stack and a 0-d tensor of its number.
        part: number of this call within the layer, from 0.
    """

    __slots__ = (
        "backend",
        "causal",
        "dropout",
        "extra",
        "features",
        "frame",
        "gqa",
        "mask",
        "native_parallel",
        "original",
        "part",
        "position",
        "scale",
    )

    def __init__(
        self,
        original: Callable[..., Any],
        mask: Any,
        dropout: float,
        causal: bool,
        scale: float | None,
        gqa: bool,
        backend: Any = None,
        native_parallel: Any = None,
        extra: dict[str, Any] | None = None,
    ) -> None:
        self.original = original
        self.mask = mask
        self.dropout = dropout
        self.causal = causal
        self.scale = scale
        self.gqa = gqa
        self.backend = backend
        self.native_parallel = native_parallel
        self.extra = extra
        self.frame: Frame | None = ACTIVE.frame
        self.features: tuple[Feature, ...] = ()
        self.position = 0
        self.part = 0
        if self.frame is not None:
            self.part = self.frame.calls
            self.frame.calls += 1

    def next(self, q_BSHD: torch.Tensor, k_BTHD: torch.Tensor, v_BTHD: torch.Tensor) -> torch.Tensor:
        """Run the features further in, then the original call, on these tensors and this context's mask."""
        start = self.position
        out = None
        while out is None and self.position < len(self.features):
            feature = self.features[self.position]
            self.position += 1
            out = feature.attention(q_BSHD, k_BTHD, v_BTHD, self)
        self.position = start
        return self.original(q_BSHD, k_BTHD, v_BTHD, self) if out is None else out

    def next_with_lse(
        self, q_BSHD: torch.Tensor, k_BTHD: torch.Tensor, v_BTHD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`next` on a part of the keys: the output, and the float32 (B, H, S) log-sum-exp by which parts are put together.

        Raises:
            GenerationError: a feature further in has an `attention` and no `attention_with_lse`, or none takes the part.
        """
        for feature in self.features[self.position :]:
            found = feature.attention_with_lse(q_BSHD, k_BTHD, v_BTHD, self)
            if found is not None:
                return found
            if type(feature).attention_with_lse is Feature.attention_with_lse:
                raise GenerationError(
                    f"{self.layer}: {feature.name} gives no log-sum-exp, so attention cannot be put together from parts; use "
                    "another kernel, or no ring"
                )
        raise GenerationError(
            f"{self.layer}: no kernel that gives a log-sum-exp runs here, so attention cannot be put together from parts; name "
            "one, or use no ring"
        )

    @property
    def site(self) -> AttentionSite | None:
        return self.frame.site if self.frame is not None else None

    @property
    def layer(self) -> str:
        """Which layer this is, for messages."""
        return self.site.path if self.site is not None else "an attention layer"

    def kind(self, query_tokens: int, key_tokens: int) -> str:
        """*self*, *joint* or *cross*, by what the processor was given, and checked against the lengths.

        Raises:
            GenerationError: the lengths fit none of the three.
        """
        frame = self.frame
        if frame is None or frame.encoder_hidden_states is None or frame.encoder_hidden_states is frame.hidden_states:
            return "self"
        image, text = frame.hidden_states.shape[1], frame.encoder_hidden_states
        if text.dim() == 4 and ACTIVE.layout is None and image == query_tokens * text.shape[1]:
            return "cross"  # WanAnimate's faces: (B, frames, S, C), and the queries of a frame see those of that frame
        if image < query_tokens <= image + text.shape[1] and query_tokens == key_tokens:
            return "joint"
        if query_tokens == image:
            return "cross"
        raise GenerationError(
            f"{self.layer}: attention of {query_tokens} queries on {key_tokens} keys, with {image} and {text.shape[1]} "
            "tokens going into the processor, is neither self, joint nor cross attention; use no feature that reuses or spreads "
            "attention"
        )

    def text_span(self, query_tokens: int) -> tuple[int, int]:
        """First and last + 1 position of the text tokens in joint attention; (0, 0) in self and cross attention.

        Raises:
            GenerationError: the map is an inferred one, and does not know the order of the tokens.
        """
        frame = self.frame
        if frame is None or frame.encoder_hidden_states is None or frame.encoder_hidden_states is frame.hidden_states:
            return (0, 0)
        image = frame.hidden_states.shape[1]
        if query_tokens <= image:
            return (0, 0)
        stack = frame.site.stack if frame.site is not None else None
        if stack is None or not stack.order:
            raise GenerationError(
                f"{self.layer}: whether text or image tokens come first cannot be seen from outside; pass a hook map"
            )
        return (0, query_tokens - image) if stack.order[0] == "text" else (image, query_tokens)


# -- the functions that stand in the processors' globals ---------------------------------------------------------------


def seam_dispatch(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    attention_kwargs: dict[str, Any] | None = None,
    *,
    backend: Any = None,
    parallel_config: Any = None,
) -> Any:
    """In place of diffusers' `dispatch_attention_fn`: (B, S, H, D) in and out."""
    features = ACTIVE.attention
    if features is None:
        return dispatch_attention_fn(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, attention_kwargs,
            backend=backend, parallel_config=parallel_config,
        )  # fmt: skip
    ctx = AttentionContext(
        _dispatch, attn_mask, dropout_p, is_causal, scale, enable_gqa, backend, parallel_config, attention_kwargs
    )
    ctx.features = features
    return ctx.next(query, key, value)


def _dispatch(q_BSHD: Any, k_BTHD: Any, v_BTHD: Any, ctx: AttentionContext) -> Any:
    return dispatch_attention_fn(
        q_BSHD, k_BTHD, v_BTHD, ctx.mask, ctx.dropout, ctx.causal, ctx.scale, ctx.gqa, ctx.extra,
        backend=ctx.backend, parallel_config=ctx.native_parallel,
    )  # fmt: skip


def seam_sdpa(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """In place of `F.scaled_dot_product_attention`: (B, H, S, D) in and out, (B, S, H, D) for the features."""
    features = ACTIVE.attention
    if features is None or query.dim() != 4:
        return torch_functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    ctx = AttentionContext(_sdpa, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    ctx.features = features
    return ctx.next(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)).transpose(1, 2)


def _sdpa(q_BSHD: Any, k_BTHD: Any, v_BTHD: Any, ctx: AttentionContext) -> Any:
    out_BHSD = torch_functional.scaled_dot_product_attention(
        q_BSHD.transpose(1, 2),
        k_BTHD.transpose(1, 2),
        v_BTHD.transpose(1, 2),
        ctx.mask,
        ctx.dropout,
        ctx.causal,
        scale=ctx.scale,
        enable_gqa=ctx.gqa,
    )
    return out_BHSD.transpose(1, 2)


def _functional_with_seam() -> types.ModuleType:
    """A copy of torch.nn.functional in which scaled_dot_product_attention is ours."""
    module = types.ModuleType(torch_functional.__name__)
    vars(module).update(vars(torch_functional))
    module.scaled_dot_product_attention = seam_sdpa  # type: ignore[attr-defined]
    return module


FUNCTIONAL = _functional_with_seam()
"""What a processor's `F` becomes."""
