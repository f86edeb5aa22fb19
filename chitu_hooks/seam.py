"""The shim that carries the denoiser and the block seam: a callable in a module's `_compiled_call_impl`.

`nn.Module.__call__` prefers the instance's `_compiled_call_impl` when it is set. A shim there stays outside every traced
region, chains whatever was there (a compiled call) or the ordinary call with all its hooks and offloading, and is dropped
by torch when the module is copied or pickled. Shims of several handles on one module form a list through `inner`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

SLOT = "_compiled_call_impl"
ABSENT = object()
"""The module had no attribute of that name, which is not the same as None."""


class Shim:
    """One handle's place in front of one module's call.

    Args:
        module: the module in front of which it stands.
        site: what `enter` is told.
        enter: ``enter(site, rest, args, kwargs)`` with `rest` the remaining chain; it passes on what is not its own.
    """

    __slots__ = ("active", "buried", "enter", "inner", "module", "rest", "site")

    def __init__(self, module: nn.Module, site: Any, enter: Callable[..., Any]) -> None:
        self.module = module
        self.site = site
        self.enter = enter
        self.active = False
        self.buried = False
        """Whether an earlier shim in place of this one was wrapped by a stranger, and now only passes through."""
        self.inner: Any = ABSENT
        """What stood there before: a callable, another shim, None, or `ABSENT`."""
        self.rest: Callable[..., Any] = module._call_impl

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.active:
            return self.rest(*args, **kwargs)
        return self.enter(self.site, self.rest, args, kwargs)

    def install(self) -> None:
        """Stand in front of whatever is there now; nothing happens if this shim is in the chain already."""
        slots = vars(self.module)
        top = slots.get(SLOT, ABSENT)
        if self in chain(top):
            return
        self._chain_to(top)
        self.active = True
        slots[SLOT] = self

    def renewed(self) -> Shim:
        """The shim that stands in front from now on: this one or, where a stranger came to stand in front, a new one.

        The stranger may have wrapped this one, which then must not act a second time further in: it passes through.
        """
        top = vars(self.module).get(SLOT, ABSENT)
        if self in chain(top):
            return self
        if keeps_nothing(top):
            self.install()
            return self
        self.active = False
        fresh = Shim(self.module, self.site, self.enter)
        fresh.buried = True
        fresh.install()
        return fresh

    def remove(self) -> bool:
        """Leave the chain.

        Returns:
            False if something of a stranger stands in front, so that this shim can only pass through from now on.
        """
        self.active = False
        slots = vars(self.module)
        top = slots.get(SLOT, ABSENT)
        if top is self:
            if self.inner is ABSENT:
                del slots[SLOT]
            else:
                slots[SLOT] = self.inner
            return not self.buried
        for shim in chain(top):
            if shim.inner is self:
                shim._chain_to(self.inner)
                return not self.buried
        return keeps_nothing(top)

    def _chain_to(self, inner: Any) -> None:
        self.inner = inner
        self.rest = inner if callable(inner) else self.module._call_impl

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return (_nothing, ())


def _nothing() -> None:
    """What a copied or pickled shim becomes: no shim."""


def keeps_nothing(top: Any) -> bool:
    """Whether what stands in front of a module cannot have wrapped what stood there before.

    ``module.compile()`` replaces that and keeps nothing of it; any other callable may call it.
    """
    return not callable(top) or hasattr(top, "_torchdynamo_orig_callable")


def chain(top: Any) -> list[Shim]:
    """The shims in front of a module, outermost first."""
    shims = []
    while isinstance(top, Shim):
        shims.append(top)
        top = top.inner
    return shims
