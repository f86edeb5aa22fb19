"""Caches: each strategy is a small file of policy, everything else belongs to the engine."""

from .calibrate import calibrate
from .flops import FlopCount, Ledger, count_flops
from .params import EasyCache, FBCache, MagCache, Params, Static, TaylorSeer, make_params
from .strategy import Strategy, make_strategy

__all__ = [
    "EasyCache",
    "FBCache",
    "FlopCount",
    "Ledger",
    "MagCache",
    "Params",
    "Static",
    "Strategy",
    "TaylorSeer",
    "calibrate",
    "count_flops",
    "make_params",
    "make_strategy",
]
