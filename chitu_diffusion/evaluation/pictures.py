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
