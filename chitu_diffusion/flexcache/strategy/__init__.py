"""The strategies. A new one is one file here, a params class, and a row in `STRATEGIES`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chitu_hooks import PatchError

from ..limits import Params
from ..params import make_params
from .base import Strategy
from .blockdance import BlockDanceStrategy
from .cubic import CubicStrategy
from .easycache import EasyCacheStrategy
from .fbcache import FBCacheStrategy
from .magcache import MagCacheStrategy
from .meancache import MeanCacheStrategy
from .pab import PABStrategy
from .planned import PlannedStrategy
from .static import StaticStrategy
from .taylorseer import taylorseer
from .teacache import TeaCacheStrategy

STRATEGIES: dict[str, Callable[[Any], Strategy]] = {
    "static": StaticStrategy,
    "fbcache": FBCacheStrategy,
    "magcache": MagCacheStrategy,
    "easycache": EasyCacheStrategy,
    "taylorseer": taylorseer,
    "teacache": TeaCacheStrategy,
    "meancache": MeanCacheStrategy,
    "blockdance": BlockDanceStrategy,
    "pab": PABStrategy,
    "cubic": CubicStrategy,
    "planned": PlannedStrategy,
}
"""Strategy name -> what makes it from its params."""


def make_strategy(cache: str | Params) -> Strategy:
    """The strategy for a name or for parameters.

    Raises:
        PatchError: no such strategy, or it has parameters without a default; the message says which.
    """
    if not isinstance(cache, (str, Params)):
        raise PatchError(f"cache is a name or parameters such as Static(steps=(0, 1, 2)), not {type(cache).__name__}")
    params = make_params(cache) if isinstance(cache, str) else cache
    return STRATEGIES[params.strategy](params)


__all__ = ["STRATEGIES", "Strategy", "make_strategy"]
