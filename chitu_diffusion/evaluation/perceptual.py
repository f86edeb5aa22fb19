"""LPIPS, when its package is there and its weights can be had."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Distance = Callable[[Any, Any], float]
"""Of two pictures shaped (height, width, channels) with values from 0 to 1."""


def lpips_distance(tell: Callable[[str], None]) -> Distance | str:
    """LPIPS with AlexNet (Zhang et al. 2018, https://arxiv.org/abs/1801.03924) at the pictures' own size.

    Args:
        tell: is told what has to be downloaded.

    Returns:
        The distance, or why there is none.
    """
    try:
        import lpips
        import torch
    except ImportError as error:
        return f"LPIPS is left out: {error}; pip install 'chitu-diffusion[eval]' adds it"
    except Exception as error:  # what a torchvision made for another torch raises
        return (
            f"LPIPS is left out: import lpips fails ({type(error).__name__}: {' '.join(str(error).split())[:200]}); it needs the "
            "torchvision that was made for the torch installed"
        )
    tell("LPIPS needs AlexNet's weights: 233 MB from download.pytorch.org, unless torch's cache has them")
    try:
        network = lpips.LPIPS(net="alex", verbose=False).eval()
    except Exception as error:  # no network, a full disk, a proxy: the rest of the bench goes on
        return f"LPIPS is left out: its weights cannot be had: {' '.join(str(error).split())[:200]}"

    def distance(one: Any, other: Any) -> float:
        a, b = (torch.as_tensor(x, dtype=torch.float32).movedim(-1, 0)[None] * 2 - 1 for x in (one, other))
        with torch.no_grad():
            return float(network(a, b))

    return distance
