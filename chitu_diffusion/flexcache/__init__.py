"""Caches: each strategy is a small file of policy, everything else belongs to the engine."""

from .calibrate import calibrate
from .flops import FlopCount, Ledger, count_flops
from .limits import Params
from .params import (
    PAB,
    BlockDance,
    Cubic,
    EasyCache,
    FBCache,
    MagCache,
    MeanCache,
    Static,
    TaylorSeer,
    TeaCache,
    make_params,
)
from .planning.params import Planned
from .planning.profile import Profile
from .strategy import Strategy, make_strategy

__all__ = [
    "PAB",
    "BlockDance",
    "Cubic",
    "EasyCache",
    "FBCache",
    "FlopCount",
    "Ledger",
    "MagCache",
    "MeanCache",
    "Params",
    "Planned",
    "Profile",
    "Static",
    "Strategy",
    "TaylorSeer",
    "TeaCache",
    "calibrate",
    "count_flops",
    "make_params",
    "make_strategy",
]
