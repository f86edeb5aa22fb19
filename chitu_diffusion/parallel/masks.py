"""Masks of attention over tokens that are spread over ranks. Traced by torch.compile.

What can be kept exact is a mask of keys alone, (B, H or 1, 1, T): given for all tokens, in the model's order, or for the
tokens of this rank, in this rank's order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from chitu_hooks import GenerationError

from .collectives import all_gather_dim
from .layout import Layout, start


def key_mask(mask: Any, batch: int, queries: int) -> Tensor:
    """The mask as (B or 1, H or 1, 1, T).

    Raises:
        GenerationError: it differs between queries, or its form is ambiguous.
    """
    if mask.dim() == 2 and mask.shape[0] == batch != queries:
        return mask[:, None, None, :]
    if mask.dim() == 4 and mask.shape[2] == 1:
        return mask
    raise GenerationError(
        f"context parallel: an attention mask of shape {tuple(mask.shape)} differs between queries; only masks of keys, "
        "(batch, 1, 1, keys), can be spread over ranks"
    )


def received_mask(mask_BH1T: Tensor, sizes: tuple[int, ...], layout: Layout, group: str) -> Tensor:
    """The mask for all keys, in the order in which they are received: that of ranks, or the model's where text is shared.

    Args:
        sizes: keys of each rank.
        group: of all ranks.

    Raises:
        GenerationError: the mask is neither for all tokens nor for those of this rank.
    """
    T = mask_BH1T.shape[3]
    apart = sizes is not layout.image and sizes != layout.image
    text, pictures = layout.text[layout.rank], sum(layout.image)
    everything = (text if layout.shared else sum(layout.text)) + pictures if apart else pictures
    if everything == T:
        return _by_rank(mask_BH1T, layout) if apart and not layout.shared else mask_BH1T
    if sizes[layout.rank] != T:
        raise GenerationError(
            f"context parallel: a mask of {T} keys is neither for the {sizes[layout.rank]} tokens of this rank nor for all "
            f"{everything}"
        )
    if not apart or not layout.shared:
        return all_gather_dim(mask_BH1T, 3, sizes, group)
    words, own = (mask_BH1T[..., :text], mask_BH1T[..., text:])
    if not layout.text_first:
        own, words = mask_BH1T[..., :-text], mask_BH1T[..., -text:]
    found = all_gather_dim(own, 3, layout.image, group)
    return torch.cat([words, found] if layout.text_first else [found, words], 3)


def _by_rank(mask_BH1T: Tensor, layout: Layout) -> Tensor:
    """A mask in the model's order in the order of ranks."""
    text_from, image_from = (0, sum(layout.text)) if layout.text_first else (sum(layout.image), 0)
    runs = []
    for rank in range(len(layout.image)):
        words = mask_BH1T.narrow(3, text_from + start(layout.text, rank), layout.text[rank])
        pictures = mask_BH1T.narrow(3, image_from + start(layout.image, rank), layout.image[rank])
        runs += [words, pictures] if layout.text_first else [pictures, words]
    return torch.cat(runs, 3)
