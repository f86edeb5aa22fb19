"""The attention seam: the processor object stays, its `__class__` becomes a shared subclass whose attention calls are ours.

The subclass runs the original code objects with replaced globals, so that `dispatch_attention_fn` and
`F.scaled_dot_product_attention` are functions of this module. There is one subclass per processor class, never one per
layer or per handle: which features run is read from `ACTIVE.attention`, which is set only inside a hooked denoiser call.
That is why a sibling pipeline that shares the transformer runs the stock call, and why torch.compile sees two graphs at
most. Everything here is traced; it was tried with ``fullgraph=True``.

Shape legend: B batch, S query tokens, T key tokens, H heads, D head dim.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
import types
import weakref
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.nn.functional as torch_functional
from diffusers.hooks._helpers import AttentionProcessorRegistry
from diffusers.models.attention_dispatch import dispatch_attention_fn

from .errors import GenerationError
from .state import ACTIVE

if TYPE_CHECKING:
    import torch

    from .feature import Feature
    from .sites import AttentionSite

MARK = "_chitu_attention"
"""Attribute of a hooked processor: its `Holders`."""


class Frame:
    """The processor call around an attention call: which tokens went in, and where it is."""

    __slots__ = ("encoder_hidden_states", "hidden_states", "site")

    def __init__(self, hidden_states: Any, encoder_hidden_states: Any, site: AttentionSite | None) -> None:
        self.hidden_states = hidden_states
        self.encoder_hidden_states = encoder_hidden_states
        self.site = site


class AttentionContext:
    """Everything about one attention call except q, k and v.

    Attributes:
        mask: boolean or additive mask that broadcasts to (B, H, S, T), or None.
        causal, scale, gqa, dropout: as in `torch.nn.functional.scaled_dot_product_attention`.
        backend: diffusers' backend that the user set on this processor, or None.
        native_parallel: diffusers' own parallel configuration of this processor, or None.
        extra: further keyword arguments for diffusers' dispatcher.
        site: the layer, with its path, stack and a 0-d tensor of its number.
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

    @property
    def site(self) -> AttentionSite | None:
        return self.frame.site if self.frame is not None else None

    def kind(self, query_tokens: int, key_tokens: int) -> str:
        """*self*, *joint* or *cross*, by what the processor was given, and checked against the lengths.

        Raises:
            GenerationError: the lengths fit none of the three.
        """
        frame = self.frame
        image = frame.hidden_states.shape[1] if frame is not None else query_tokens
        text = frame.encoder_hidden_states if frame is not None else None
        if text is None or text is frame.hidden_states:
            return "self"
        if image < query_tokens <= image + text.shape[1] and query_tokens == key_tokens:
            return "joint"
        if query_tokens == image:
            return "cross"
        raise GenerationError(
            f"attention of {query_tokens} queries on {key_tokens} keys, with {image} and {text.shape[1]} tokens going into "
            "the processor, is neither self, joint nor cross attention"
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
                "whether text or image tokens come first cannot be seen from outside: pass a hook map"
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


_FUNCTIONAL = _functional_with_seam()


# -- the shared subclass -----------------------------------------------------------------------------------------------

_HOOKED: weakref.WeakValueDictionary[type, type] = weakref.WeakValueDictionary()
"""Processor class -> its hooked subclass, for as long as some processor is of it."""


def _calls_attention(function: types.FunctionType, seen: set[int]) -> bool:
    """Whether the code of `function`, or a helper of the same module that it names, calls attention."""
    if id(function.__code__) in seen:
        return False
    seen.add(id(function.__code__))
    names = _names(function.__code__)
    scope = function.__globals__
    for name in names:
        value = scope.get(name)
        if value is dispatch_attention_fn:
            return True
        if value is torch_functional and "scaled_dot_product_attention" in names:
            return True
        if isinstance(value, types.FunctionType) and value.__globals__ is scope and _calls_attention(value, seen):
            return True
    return False


def _names(code: types.CodeType) -> set[str]:
    """Every global and attribute name that `code` uses, its nested functions included."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names


def _methods(cls: type) -> dict[str, types.FunctionType]:
    """The methods of a processor class that call attention, by name."""
    methods = {}
    for name in dir(cls):
        function = inspect.unwrap(getattr(cls, name)) if callable(getattr(cls, name, None)) else None
        if isinstance(function, types.FunctionType) and _calls_attention(function, set()):
            methods[name] = function
    return methods


_REACHES: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()
"""Processor class -> whether it calls attention; weak, since a class may be a hooked one of another handle."""


def reaches_attention(cls: type) -> bool:
    """Whether the seam can intercept what processors of `cls` compute."""
    if cls not in _REACHES:
        _REACHES[cls] = bool(_methods(cls))
    return _REACHES[cls]


def _clone(function: types.FunctionType, scopes: dict[int, dict[str, Any]]) -> types.FunctionType:
    """`function` with globals in which attention, and the helpers that call it, are ours.

    The globals are a snapshot: what is monkeypatched into that module later is not seen.
    """
    scope = scopes.get(id(function.__globals__))
    if scope is None:
        scope = scopes[id(function.__globals__)] = dict(function.__globals__)
        # With its name, torch.compile would guard on the real module, where attention is not ours.
        del scope["__name__"]
        for name, value in function.__globals__.items():
            if value is dispatch_attention_fn:
                scope[name] = seam_dispatch
            elif value is torch_functional:
                scope[name] = _FUNCTIONAL
            elif (
                isinstance(value, types.FunctionType)
                and value.__globals__ is function.__globals__
                and _calls_attention(value, set())
            ):
                scope[name] = _clone(value, scopes)
    clone = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    clone.__kwdefaults__ = function.__kwdefaults__
    clone.__qualname__ = function.__qualname__
    clone.__module__ = function.__module__
    clone.__dict__.update(function.__dict__)
    return clone


def _framed(stock: Callable[..., Any], clone: types.FunctionType) -> Callable[..., Any]:
    """`clone` inside a `Frame`. It keeps the signature: `Attention.forward` drops arguments that it does not find there."""
    names = list(inspect.signature(stock).parameters)[1:]
    image_at = names.index("hidden_states") if "hidden_states" in names else -1
    text_at = names.index("encoder_hidden_states") if "encoder_hidden_states" in names else -1

    @functools.wraps(stock)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if ACTIVE.attention is None:
            return stock(self, *args, **kwargs)
        image = args[image_at] if 0 <= image_at < len(args) else kwargs.get("hidden_states")
        text = args[text_at] if 0 <= text_at < len(args) else kwargs.get("encoder_hidden_states")
        outer = ACTIVE.frame
        ACTIVE.frame = Frame(image, text, self._chitu_attention.site(args[0] if args else kwargs.get("attn")))
        try:
            return clone(self, *args, **kwargs)
        finally:
            ACTIVE.frame = outer

    # torch.compile guards on the length of the defaults when it traces `inspect.signature` of this method.
    __call__.__defaults__ = ()
    return __call__


def unhooked_reduce(self: Any, protocol: Any, base: type) -> Any:
    """`__reduce_ex__` of a hooked object: the copy is of class `base` and carries no mark of ours."""
    parts = list(base.__reduce_ex__(self, protocol))
    parts[1] = tuple(base if argument is type(self) else argument for argument in parts[1])
    if parts[0] is copyreg.__newobj__:  # type: ignore[attr-defined]  # pickle takes it for objects of that very class only
        parts[0] = new_object
    if len(parts) > 2 and isinstance(parts[2], dict):
        parts[2] = {key: value for key, value in parts[2].items() if not key.startswith("_chitu_")}
    return tuple(parts)


def new_object(cls: type, *args: Any) -> Any:
    """An instance of `cls`, not initialised: how a copy of a hooked object begins."""
    return cls.__new__(cls, *args)


def _hooked_class(cls: type) -> type:
    hooked = _HOOKED.get(cls)
    if hooked is None:
        scopes: dict[int, dict[str, Any]] = {}
        body: dict[str, Any] = {name: _clone(method, scopes) for name, method in _methods(cls).items()}
        stock = cls.__call__
        unwrapped = inspect.unwrap(stock)
        body["__call__"] = _framed(stock, body.get("__call__") or _clone(unwrapped, scopes))
        body["__reduce_ex__"] = lambda self, protocol: unhooked_reduce(self, protocol, cls)
        body["__module__"], body["__qualname__"], body["__doc__"] = cls.__module__, cls.__qualname__, cls.__doc__
        hooked = type(cls.__name__, (cls,), body)
        _HOOKED[cls] = hooked
    return hooked


_USERS: Counter[type] = Counter()
"""Hooked subclass -> number of live processors of it, while diffusers' layer-skip guidance knows it."""


def _enroll(cls: type, hooked: type) -> None:
    """Let layer-skip guidance, which looks processors up by exact class, treat `hooked` as `cls`."""
    AttentionProcessorRegistry._register()
    known = AttentionProcessorRegistry._registry.get(cls)
    if known is not None:
        AttentionProcessorRegistry._registry[hooked] = known
    _USERS[hooked] += 1


def _dismiss(hooked: type) -> None:
    """The counterpart of `_enroll`; the last processor takes the entry back."""
    _USERS[hooked] -= 1
    if not _USERS[hooked]:
        del _USERS[hooked]
        AttentionProcessorRegistry._registry.pop(hooked, None)


class Holders:
    """Which handles hold a processor, and where it stands: in several layers, if they share it."""

    __slots__ = ("dismiss", "handles", "original", "sites")

    def __init__(self, original: type) -> None:
        self.original = original
        self.sites: tuple[AttentionSite, ...] = ()
        self.handles: tuple[int, ...] = ()
        self.dismiss: Callable[[], Any] = lambda: None
        """Says once that the processor is not hooked any more, by `unhook_processor` or at its death."""

    def site(self, module: Any) -> AttentionSite:
        """Where the processor is working just now, called by `module`. Traced."""
        if len(self.sites) > 1:
            for site in self.sites:
                if site.module is module:
                    return site
        return self.sites[0]


def hook_processor(processor: Any, site: AttentionSite, holder: int) -> None:
    """Give `processor` the hooked subclass of its class, on behalf of the handle `holder`."""
    holders = vars(processor).get(MARK)
    if holders is None:
        holders = Holders(type(processor))
        hooked = _hooked_class(type(processor))
        _enroll(type(processor), hooked)
        processor.__class__ = hooked
        holders.dismiss = weakref.finalize(processor, _dismiss, hooked)
        holders.dismiss.atexit = False
        vars(processor)[MARK] = holders
    if holder not in holders.handles:
        holders.handles = (*holders.handles, holder)
    if all(known.module is not site.module for known in holders.sites):
        holders.sites = (*holders.sites, site)


def is_hooked(processor: Any, site: AttentionSite, holder: int) -> bool:
    """Whether `processor` carries the hook of this handle, and knows that it stands at `site`."""
    holders = vars(processor).get(MARK)
    if holders is None or holder not in holders.handles:
        return False
    return any(known.module is site.module for known in holders.sites)


def unhook_processor(processor: Any, holder: int) -> bool:
    """Take back what `hook_processor` did.

    Returns:
        False if the class was changed by somebody else meanwhile, so that it was left as it is.
    """
    holders = vars(processor).get(MARK)
    if holders is None or holder not in holders.handles:
        return True
    holders.handles = tuple(h for h in holders.handles if h != holder)
    if holders.handles:
        return True
    del vars(processor)[MARK]
    holders.dismiss()
    if type(processor) is not _HOOKED.get(holders.original):
        return False
    processor.__class__ = holders.original
    return True
