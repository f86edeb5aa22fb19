"""What calibration leaves: inner products of the velocities of full runs, and everything that follows from them.

A sampler of N Euler steps adds ``Δσ_i v_i`` at each, so the latent before step k is ``x_0 + X_k`` with
``X_k = Σ_{i<k} Δσ_i v_i``. Whatever combines velocities is a vector of N coefficients c, and its squared length is the quadratic
form ``cᵀ G c`` in the Gram matrix ``G_ij = <v_i, v_j>``. No tensor of the size of a latent is needed after calibration.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Index = NDArray[np.integer[Any]]


@dataclass(frozen=True, eq=False)
class Tables:
    """Measurements of P full runs of N steps.

    Attributes:
        sigmas: (N + 1), as the scheduler integrates over them; the last one is where the run ends.
        gram: (P, N, N) inner products of what the scheduler was given at the steps of each run, as means over the elements.
        final: (P) mean squares of the final latents; None makes errors relative to the way that the latent went.
        gains: (N + 1) how many times an error of the latent before step k grows until the end; None: by rule.
        response: (R, N) by how much the velocity of step k moves when the latent before it moves by 1, in the first R of the
            runs; None: by rule.

    Raises:
        ValueError: shapes that do not go together, or numbers that are not finite.
    """

    sigmas: Array
    gram: Array
    final: Array | None = None
    gains: Array | None = None
    response: Array | None = None

    def __post_init__(self) -> None:
        for name in ("sigmas", "gram", "final", "gains", "response"):
            value = getattr(self, name)
            if value is None:
                continue
            value = np.asarray(value, np.float64)
            if not np.isfinite(value).all():
                raise ValueError(f"{name} holds numbers that are not finite")
            object.__setattr__(self, name, value)
        steps, runs = len(self.sigmas) - 1, len(self.gram)
        if steps < 1 or not runs or self.gram.shape != (runs, steps, steps):
            raise ValueError(f"{len(self.sigmas)} sigmas do not go with Gram matrices of shape {self.gram.shape}")
        for name, length in (("final", runs), ("gains", steps + 1)):
            value = getattr(self, name)
            if value is not None and value.shape != (length,):
                raise ValueError(f"{name} has shape {value.shape}, not ({length},)")
        if self.response is not None:
            _check_response(self.response, runs, steps)

    @property
    def steps(self) -> int:
        """N."""
        return len(self.sigmas) - 1

    @cached_property
    def deltas(self) -> Array:
        """(N) what each step multiplies its velocity with."""
        return np.diff(self.sigmas)

    @cached_property
    def scale(self) -> Array:
        """(P) mean squares that errors are relative to."""
        if self.final is not None:
            return self.final
        return np.einsum("i,pij,j->p", self.deltas, self.gram, self.deltas)

    @cached_property
    def relative(self) -> Array:
        """(P, N, N) the Gram matrices, each relative to `scale`."""
        return self.gram / self.scale[:, None, None]

    @cached_property
    def mean(self) -> Array:
        """(N, N) `relative` averaged over the runs: what weights are fitted to."""
        return self.relative.mean(0)

    def sizes(self, coefficients: Array) -> Array:
        """Relative squared lengths of combinations of velocities: (…, N) -> (P, …)."""
        flat = coefficients.reshape(-1, self.steps)
        products = np.einsum("kj,pkj->pk", flat, flat @ self.relative)
        return np.maximum(products, 0).reshape(len(self.gram), *coefficients.shape[:-1])

    def after(self, start: int) -> Tables:
        """The tables of a run that begins at step `start`, as img2img does."""
        cut = slice(start, None)
        gains = None if self.gains is None else self.gains[cut]
        response = None if self.response is None else self.response[:, cut]
        return Tables(self.sigmas[cut], self.gram[:, cut, cut], self.final, gains, response)


def _check_response(response: Array, runs: int, steps: int) -> None:
    """Raises:
    ValueError: it is not that of some of these runs.
    """
    if response.ndim != 2 or not 1 <= len(response) <= runs or response.shape[1] != steps:
        raise ValueError(f"response has shape {response.shape}, not (1 to {runs}, {steps})")
    if (response < 0).any():
        raise ValueError("response holds numbers below 0")
