"""How alike two pictures are. Pictures are arrays or tensors of floats."""

from __future__ import annotations

import math
from typing import Any

import torch


def psnr(one: Any, other: Any, peak: float = 1.0) -> float:
    """Peak signal-to-noise ratio in dB, computed in 64-bit floats; infinite for equal pictures.

    Args:
        one, other: of the same shape.
        peak: largest possible value.

    Raises:
        ValueError: the shapes differ.
    """
    a, b = _floats(one), _floats(other)
    if a.shape != b.shape:
        raise ValueError(f"pictures of shapes {tuple(a.shape)} and {tuple(b.shape)} cannot be compared")
    error = torch.mean((a - b) ** 2).item()
    return math.inf if error == 0 else 10 * math.log10(peak**2 / error)


def ssim(one: Any, other: Any, peak: float = 1.0) -> float:
    """Mean structural similarity of two pictures shaped (height, width, channels), 1 for equal ones.

    Args:
        one, other: at least 7 pixels high and wide.
        peak: largest possible value.

    Raises:
        ImportError: scikit-image is not installed; the `eval` extra brings it.
        ValueError: the shapes differ, or a picture is smaller than 7 pixels.
    """
    try:
        from skimage.metrics import structural_similarity
    except ImportError as error:
        raise ImportError("ssim needs scikit-image: pip install 'chitu-diffusion[eval]'") from error
    a, b = _floats(one).numpy(), _floats(other).numpy()
    return float(structural_similarity(a, b, data_range=peak, channel_axis=-1))


def _floats(picture: Any) -> torch.Tensor:
    return torch.as_tensor(picture).detach().to("cpu", torch.float64)


def ms_ssim(one: Any, other: Any, peak: float = 1.0) -> float | None:
    """Multi-scale structural similarity of two pictures shaped (height, width, channels), 1 for equal ones.

    Wang, Simoncelli and Bovik 2003, https://doi.org/10.1109/ACSSC.2003.1292216: Gaussian windows of 11 pixels with σ 1.5, five
    scales with the exponents of that paper, contrast and structure at all of them, luminance at the coarsest.

    Returns:
        None if the shorter side has 160 pixels or less: the coarsest scale would be smaller than the window.

    Raises:
        ValueError: the shapes differ.
    """
    a, b = _floats(one), _floats(other)
    if a.shape != b.shape:
        raise ValueError(f"pictures of shapes {tuple(a.shape)} and {tuple(b.shape)} cannot be compared")
    if min(a.shape[:2]) <= 160:
        return None
    a, b = (picture.movedim(-1, 0)[:, None] for picture in (a, b))
    product = torch.ones(a.shape[0], dtype=a.dtype)
    for number, exponent in enumerate(MS_SSIM_EXPONENTS):
        if number:
            a, b = (torch.nn.functional.avg_pool2d(x, 2) for x in (a, b))
        luminance, contrast = ssim_terms(a, b, peak)
        last = number == len(MS_SSIM_EXPONENTS) - 1
        mean = (luminance * contrast if last else contrast).mean((1, 2, 3))
        product = product * mean.clamp(min=0) ** exponent
    return float(product.mean())


MS_SSIM_EXPONENTS = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)
"""From the finest scale to the coarsest."""


def ssim_terms(a: torch.Tensor, b: torch.Tensor, peak: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Luminance, and contrast times structure, of (C, 1, H, W) tensors at every place where the whole window fits."""
    place = torch.arange(11, dtype=a.dtype) - 5
    bell = torch.exp(-(place**2) / (2 * 1.5**2))
    bell = bell / bell.sum()

    def blur(x: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.conv2d(x, bell.view(1, 1, 11, 1))
        return torch.nn.functional.conv2d(x, bell.view(1, 1, 1, 11))

    c1, c2 = (0.01 * peak) ** 2, (0.03 * peak) ** 2
    mean_a, mean_b = blur(a), blur(b)
    luminance = (2 * mean_a * mean_b + c1) / (mean_a**2 + mean_b**2 + c1)
    variances = blur(a * a) - mean_a**2 + blur(b * b) - mean_b**2
    contrast = (2 * (blur(a * b) - mean_a * mean_b) + c2) / (variances + c2)
    return luminance, contrast


def relative_l2(one: Any, other: Any) -> float:
    """Length of the difference of two tensors over that of `other`, in 64-bit floats."""
    a, b = _floats(one), _floats(other)
    if a.shape != b.shape:
        raise ValueError(f"tensors of shapes {tuple(a.shape)} and {tuple(b.shape)} cannot be compared")
    return float(torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b))
