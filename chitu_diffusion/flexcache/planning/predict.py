"""The forecast of a velocity from those computed last: least squares on Gram matrices, shrunk towards holding the newest.

With history ``h_0 > h_1 > …`` (newest first) the forecast is ``v̂_t = v_{h_0} + Σ_q u_q (v_{h_0} - v_{h_q})``: its weights sum
to one, ``u = 0`` holds, and one difference is a line. Least squares choose u over all calibration runs; a ridge pulls it to 0.
They are linear in what they aim at: fitting each velocity of a gap or their sum ``Σ Δσ_t v_t`` at once gives the same latent.

Sources: hold is a coarser Euler grid; lines are order 1 of TaylorSeer (https://arxiv.org/abs/2503.06923); regression on the
history is what L2P (https://arxiv.org/abs/2604.26365) learns; here it is in closed form.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .gram import Array

METHODS = ("hold", "linear", "ridge")
RIDGE = 1e-4
"""Added to the diagonal of the normal equations, relative to it."""


def weights(
    gram: Array,
    history: Sequence[int],
    target: int,
    method: str = "ridge",
    *,
    times: Sequence[float] | None = None,
    ridge: float = RIDGE,
) -> tuple[float, ...]:
    """Weights of the computed velocities `history` in the forecast of that of step `target`.

    Args:
        gram: (N, N) inner products of the velocities, averaged over runs.
        history: computed steps, newest first. "hold" reads one of them, "linear" two, "ridge" all.
        target: the step to forecast.
        method: one of `METHODS`.
        times: (N) what "linear" draws its line over; the index of the step if None.
        ridge: how strongly "ridge" is pulled towards hold, relative to the differences' own size.

    Returns:
        One weight for each of `history`; they sum to 1.
    """
    if method not in METHODS:
        raise ValueError(f"no method {method!r}; there are {', '.join(METHODS)}")
    if method == "hold" or len(history) == 1:
        found: tuple[float, ...] = (1.0,)
    elif method == "linear":
        found = line(range(len(gram)) if times is None else times, history, target)
    else:
        unit = np.eye(len(gram))
        differences = unit[history[0]] - unit[list(history[1:])]
        bends = slopes(gram, differences, (unit[target] - unit[history[0]])[None], ridge)[0]
        found = (1 + float(bends.sum()), *(-float(u) for u in bends))
    return found + (0.0,) * (len(history) - len(found))


def line(times: Sequence[float], history: Sequence[int], target: int) -> tuple[float, float]:
    """Weights of the line through the two first of `history`, over `times`."""
    new, old = times[history[0]], times[history[1]]
    slope = (times[target] - new) / (new - old)
    return (1 + slope, -slope)


def slopes(gram: Array, differences: Array, aims: Array, ridge: float = RIDGE) -> Array:
    """Least-squares coefficients of `differences` (M, N) that come nearest to each of `aims` (K, N): (K, M).

    All are combinations of velocities, given by their coefficients.
    """
    if not len(differences):
        return np.zeros((len(aims), 0))
    halves = differences @ gram
    return solve(halves @ differences.T, aims @ halves.T, ridge)


def solve(products: Array, aims: Array, ridge: float) -> Array:
    """Ridge regression, many at once: normal matrices (…, M, M), right-hand sides (…, M) -> (…, M).

    A difference of no length gets coefficient 0.
    """
    length = np.sqrt(np.maximum(np.einsum("...ii->...i", products), 0))
    safe = np.where(length > 0, length, 1)
    diagonal = ridge + np.where(length > 0, 0, 1)
    normal = products / safe[..., :, None] / safe[..., None, :] + diagonal[..., :, None] * np.eye(products.shape[-1])
    return np.linalg.solve(normal, (aims / safe)[..., None])[..., 0] / safe
