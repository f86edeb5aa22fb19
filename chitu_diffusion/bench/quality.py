"""How far pictures of a case are from the baseline's, each from the same prompt, seed and noise."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from chitu_diffusion.evaluation.perceptual import Distance
from chitu_diffusion.evaluation.pictures import ms_ssim, psnr, relative_l2, ssim

EQUAL_DB = 100.0
"""PSNR that stands for equal pictures, so that there is a mean."""
HIGHER_IS_BETTER = {"psnr": True, "ssim": True, "ms_ssim": True, "latent_rel_l2": False, "lpips": False}
RESAMPLES = 2000


@dataclass(frozen=True)
class Drawn:
    """What one case drew, in the order of the bench's items.

    Attributes:
        pictures: (N, H, W, 3) or, for clips, (N, F, H, W, 3) floats from 0 to 1.
        latents: (N, …), as the last scheduler step left them, or None if that was not seen.
    """

    pictures: torch.Tensor
    latents: torch.Tensor | None


def compare(case: Drawn, baseline: Drawn, lpips: Distance | None = None) -> dict[str, list[float]]:
    """Metric -> its value for each picture; what cannot be had is left out."""
    found: dict[str, list[float]] = {}
    for n in range(len(case.pictures)):
        one, other = case.pictures[n], baseline.pictures[n]
        values = {"psnr": min(psnr(one, other), EQUAL_DB), **_by_frame(one, other, lpips)}
        if case.latents is not None and baseline.latents is not None:
            values["latent_rel_l2"] = relative_l2(case.latents[n], baseline.latents[n])
        for name, value in values.items():
            found.setdefault(name, []).append(value)
    return found


def _by_frame(one: torch.Tensor, other: torch.Tensor, lpips: Distance | None) -> dict[str, float]:
    """Metrics of pictures; of a clip the mean over its frames."""
    pairs = list(zip(one, other)) if one.ndim == 4 else [(one, other)]
    found: dict[str, list[float]] = {}
    for a, b in pairs:
        if min(a.shape[:2]) >= 7:
            try:
                found.setdefault("ssim", []).append(ssim(a, b))
            except ImportError:
                pass
        scales = ms_ssim(a, b)
        if scales is not None:
            found.setdefault("ms_ssim", []).append(scales)
        if lpips is not None:
            found.setdefault("lpips", []).append(lpips(a, b))
    return {name: statistics.fmean(values) for name, values in found.items()}


def summarise(values: dict[str, list[float]], groups: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """Metric -> mean, worst, and the 95 % interval of the mean.

    Args:
        values: metric -> value of each picture.
        groups: the prompt of each picture: pictures of one prompt are alike, so the bootstrap draws prompts.
    """
    found = {}
    for name, numbers in values.items():
        worst = min(numbers) if HIGHER_IS_BETTER[name] else max(numbers)
        low, high = bootstrap(numbers, groups)
        found[name] = {
            "mean": _round(statistics.fmean(numbers)),
            "worst": _round(worst),
            "interval": [_round(low), _round(high)],
            "pictures": len(numbers),
        }
    return found


def bootstrap(numbers: Sequence[float], groups: Sequence[Any]) -> tuple[float, float]:
    """95 % interval of the mean, by drawing groups again with replacement; the same for the same numbers."""
    by_group: dict[Any, list[float]] = {}
    for group, number in zip(groups, numbers, strict=True):
        by_group.setdefault(group, []).append(number)
    sums = [(sum(members), len(members)) for members in by_group.values()]
    dice = random.Random(0)
    means = []
    for _ in range(RESAMPLES):
        drawn = dice.choices(sums, k=len(sums))
        means.append(sum(total for total, _ in drawn) / sum(count for _, count in drawn))
    means.sort()
    return means[round(0.025 * (RESAMPLES - 1))], means[round(0.975 * (RESAMPLES - 1))]


def _round(value: float) -> float:
    return float(f"{value:.6g}")
