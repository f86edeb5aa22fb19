"""Hooked attention processors: the object stays, its `__class__` becomes a shared subclass whose attention calls are ours.

The subclass runs the original code objects with replaced globals. There is one per processor class, never one per layer or
per handle, and it lives for as long as some processor is of it.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as torch_functional
from diffusers.hooks._helpers import AttentionProcessorRegistry
from diffusers.models.attention_dispatch import dispatch_attention_fn

from .attention import FUNCTIONAL, Frame, seam_dispatch
from .copies import unhooked_reduce
from .state import ACTIVE

if TYPE_CHECKING:
    from .sites import AttentionSite

MARK = "_chitu_attention"
"""Attribute of a hooked processor: its `Holders`."""

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
                scope[name] = FUNCTIONAL
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
            if not torch.compiler.is_compiling() and ACTIVE.layers:
                rest = functools.partial(clone, self, *args, **kwargs)
                for feature in ACTIVE.layers:
                    found = feature.attention_layer(ACTIVE.frame, rest)
                    if found is not None:
                        return found
            return clone(self, *args, **kwargs)
        finally:
            ACTIVE.frame = outer

    # torch.compile guards on the length of the defaults when it traces `inspect.signature` of this method.
    __call__.__defaults__ = ()  # type: ignore[attr-defined]
    return __call__


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

    __slots__ = ("dismiss", "original", "sites", "stands")

    def __init__(self, original: type) -> None:
        self.original = original
        self.stands: dict[int, tuple[AttentionSite, ...]] = {}
        """Handle -> where its map finds the processor."""
        self.sites: tuple[AttentionSite, ...] = ()
        """One of those for each layer, the first living handle's."""
        self.dismiss: Callable[[], Any] = lambda: None
        """Says once that the processor is not hooked any more, by `unhook_processor` or at its death."""

    def settle(self) -> None:
        """Work `sites` out anew, so that nothing of a handle that is gone is kept or asked."""
        sites: list[AttentionSite] = []
        for stands in self.stands.values():
            sites += [site for site in stands if all(known.module is not site.module for known in sites)]
        self.sites = tuple(sites)

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
    stands = holders.stands.get(holder, ())
    if all(known.module is not site.module for known in stands):
        holders.stands[holder] = (*stands, site)
        holders.settle()


def is_hooked(processor: Any, site: AttentionSite, holder: int) -> bool:
    """Whether `processor` carries the hook of this handle, and knows that it stands at `site`."""
    holders = vars(processor).get(MARK)
    return holders is not None and any(known.module is site.module for known in holders.stands.get(holder, ()))


def unhook_processor(processor: Any, holder: int) -> bool:
    """Take back what `hook_processor` did.

    Returns:
        False if the class was changed by somebody else meanwhile, so that it was left as it is.
    """
    holders = vars(processor).get(MARK)
    if holders is None or holders.stands.pop(holder, None) is None:
        return True
    if holders.stands:
        holders.settle()
        return True
    del vars(processor)[MARK]
    holders.dismiss()
    if type(processor) is not _HOOKED.get(holders.original):
        return False
    processor.__class__ = holders.original
    return True
