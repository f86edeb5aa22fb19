"""Forecasts of what the trunk adds, from what it added at the computed steps before.

Finite differences as in TaylorSeer (Liu et al. 2025, https://arxiv.org/abs/2503.06923): with n evaluations between the
last two computed ones, the q-th difference is that of the (q-1)-th ones over n, and k evaluations later the forecast is
the sum of difference q times k^q / q!. Order 0 holds the last value, order 1 is the line through the last two.

A line through two values far apart points past the next ones. Damped by d, k becomes d * k: between holding and the line, as
the scaled Hermite polynomials of HiCache are in their first order with d = 0.5 (https://arxiv.org/abs/2508.16984).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

Tree = dict[int, dict[str, torch.Tensor | None]]
"""Stack number -> role -> (B, S, C) tensor, or None for a stream that the stack does not return."""


def updated(differences: Sequence[Tree], value: Tree, gap: int, order: int) -> list[Tree]:
    """The differences after a computed step.

    Args:
        differences: those before, order 0 first; empty at the beginning.
        value: what was computed now.
        gap: evaluations since the one before.
        order: highest order to keep.
    """
    new = [value]
    if gap <= 0 or not differences or not _alike(differences[0], value):
        return new
    for old in differences[:order]:
        new.append(_combine(new[-1], old, 1 / gap))
    return new


def extrapolate(differences: Sequence[Tree], ahead: int, damping: float = 1.0) -> Tree:
    """The forecast `ahead` evaluations after the last computed one; `damping` is the part of that way that is gone."""
    way = damping * ahead
    result: Tree = {}
    for stack, streams in differences[0].items():
        result[stack] = {}
        for role, tensor in streams.items():
            for power, tree in enumerate(differences[1:], 1):
                change = tree[stack][role]
                if tensor is not None and change is not None:
                    tensor = torch.add(tensor, change, alpha=way**power / math.factorial(power))
            # A model may write into what it is handed; what is stored stays whole.
            result[stack][role] = tensor.clone() if tensor is not None and tensor is streams[role] else tensor
    return result


def _combine(new: Tree, old: Tree, factor: float) -> Tree:
    def change(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
        return None if a is None or b is None else (a - b) * factor

    return {n: {role: change(a, old[n][role]) for role, a in streams.items()} for n, streams in new.items()}


def _alike(one: Tree, other: Tree) -> bool:
    def shapes(tree: Tree) -> list[tuple[int, str, torch.Size | None]]:
        return [(n, role, None if t is None else t.shape) for n, streams in tree.items() for role, t in streams.items()]

    return shapes(one) == shapes(other)
