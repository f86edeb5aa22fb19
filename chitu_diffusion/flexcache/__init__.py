"""Caches: each strategy is a small file of policy, everything else belongs to the engine."""

from .flops import FlopCount, Ledger, count_flops
from .params import Params, Static, make_params
from .strategy import make_strategy

__all__ = ["FlopCount", "Ledger", "Params", "Static", "count_flops", "make_params", "make_strategy"]
