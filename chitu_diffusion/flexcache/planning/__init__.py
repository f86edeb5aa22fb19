"""Planning which steps to compute, and how to combine what was computed, from Gram matrices: mathematics only."""

from .combine import Plan, Setting, fitted, price
from .gram import Tables
from .predict import METHODS, weights
from .schedule import candidates, gap_costs, improve, plan, plan_for_error, searched

__all__ = [
    "METHODS",
    "Plan",
    "Setting",
    "Tables",
    "candidates",
    "fitted",
    "gap_costs",
    "improve",
    "plan",
    "plan_for_error",
    "price",
    "searched",
    "weights",
]
