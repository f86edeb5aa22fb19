"""How much the tokens of a region still change: what token caches sort tokens by.

As in Jano (https://arxiv.org/abs/2603.00519): the distances between the tokens of a region settle early where the picture is
simple. Here a region is a run of tokens in the model's order, since the trunk does not tell where a token lies in the picture.

Shape legend: B batch, S tokens, C channels, N regions, R tokens of a region.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def distances(stream: Tensor, region: int) -> Tensor:
    """Distances between the tokens of each region, (B, N, R, R), of a normalised (B, S, C) stream.

    Args:
        stream: what leaves the trunk; normalised, it is what the output projection sees, so the prediction but for a
            linear map.
        region: most tokens in a region. The last region reaches back over the one before where tokens are left over.
    """
    tokens = stream.shape[1]
    size = min(region, tokens)
    starts = torch.arange(0, tokens, size, device=stream.device).clamp(max=tokens - size)
    places = starts[:, None] + torch.arange(size, device=stream.device)
    normed = F.layer_norm(stream.float(), stream.shape[-1:])
    return torch.cdist(normed[:, places], normed[:, places], compute_mode="donot_use_mm_for_euclid_dist")


def score(seen: Sequence[Tensor]) -> Tensor:
    """How much each region changes, (N,), from 0 for the calmest of a sample to 1 for the liveliest.

    Args:
        seen: `distances` of several steps. Each is compared with the one half of them later.

    Returns:
        The largest over the batch. Not finite where no region differs from another.
    """
    later = len(seen) // 2
    changes = [(b - a).abs().mean((2, 3)) for a, b in zip(seen, seen[later:])]
    change = torch.stack(changes).mean(0)
    least = change.amin(1, keepdim=True)
    return ((change - least) / (change.amax(1, keepdim=True) - least)).amax(0)


def places_above(scores: Tensor, threshold: float, region: int, tokens: int) -> Tensor | None:
    """Places of the tokens whose region scores at least `threshold`, (s,) int64; None if that is all of them."""
    mask = (scores >= threshold).repeat_interleave(min(region, tokens))[:tokens]
    return None if bool(mask.all()) else mask.nonzero()[:, 0]
