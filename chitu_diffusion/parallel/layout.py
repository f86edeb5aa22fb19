"""How the tokens of one trunk are spread over the ranks, and how tensors are cut to fit.

A rank holds a run of the image tokens and, where the model has them apart, a run of the text tokens or all of them. Inside
attention its local sequence is one followed by the other. A model that packs text and image before the trunk has its packed
sequence spread as if it were image.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from chitu_hooks import GenerationError

from .collectives import split


class Layout(NamedTuple):
    """Everything that attention has to know; plain numbers, read by traced code."""

    rank: int
    """Place of this rank."""
    image: tuple[int, ...]
    """Image tokens of each rank; tokens of the packed sequence, if it is packed."""
    text: tuple[int, ...]
    """Text tokens of each rank; zeros where there is no text stream."""
    shared: bool
    """Every rank holds all text tokens."""
    text_first: bool
    """Order of text and image inside joint attention."""
    groups: int = 1
    """Head groups in which attention is exchanged."""

    def whole(self, tokens: int) -> int:
        """Tokens on all ranks of a sequence of which this rank has `tokens`; a sequence that is not spread stays as it is."""
        if tokens == self.image[self.rank]:
            return sum(self.image)
        words = self.text[0] if self.shared else sum(self.text)
        return sum(self.image) + words if tokens == self.image[self.rank] + self.text[self.rank] else tokens


def make_layout(streams: dict[str, Any], index: int, ranks: int, text: str, order: tuple[str, ...]) -> Layout:
    """The layout for a trunk that is entered with `streams`.

    Raises:
        GenerationError: fewer tokens than ranks, or streams that are neither image, text and image, nor joint.
    """
    main = streams.get("image", streams.get("joint"))
    if main is None:
        raise GenerationError(
            f"context parallel: the trunk is entered with {sorted(streams)}, and none of it is image or joint"
        )
    image = _share(main.shape[1], ranks, "image" if "image" in streams else "text and image")
    words = streams.get("text") if "image" in streams else None
    if words is None:
        return Layout(index, image, (0,) * ranks, False, True)
    length = words.shape[1]
    if text == "shard" or (text == "auto" and length >= ranks):
        return Layout(index, image, _share(length, ranks, "text"), False, order[0] == "text")
    return Layout(index, image, (length,) * ranks, True, order[0] == "text")


def _share(tokens: int, ranks: int, what: str) -> tuple[int, ...]:
    if tokens < ranks:
        raise GenerationError(
            f"context parallel: {tokens} {what} tokens cannot be spread over {ranks} ranks; use at most {tokens}"
            + (", or text='replicate'" if what == "text" else "")
        )
    return split(tokens, ranks)


def start(sizes: tuple[int, ...], index: int) -> int:
    """Where the run of rank `index` begins."""
    return sum(sizes[:index])


def cut(tensor: Tensor, dim: int, sizes: tuple[int, ...], index: int) -> Tensor:
    """This rank's run along `dim`."""
    return tensor.narrow(dim, start(sizes, index), sizes[index])


def cut_role(tensor: Tensor, dim: int, role: str, layout: Layout) -> Tensor:
    """This rank's part of a tensor with one entry a token of `role` along `dim`."""
    if role == "text":
        return tensor if layout.shared else cut(tensor, dim, layout.text, layout.rank)
    if role == "image" or not layout.text[layout.rank]:
        return cut(tensor, dim, layout.image, layout.rank)
    words = layout.text[0] if layout.shared else sum(layout.text)
    pictures = sum(layout.image)
    first, second = (words, pictures) if layout.text_first else (pictures, words)
    one, other = tensor.narrow(dim, 0, first), tensor.narrow(dim, first, second)
    roles = ("text", "image") if layout.text_first else ("image", "text")
    return torch.cat([cut_role(one, dim, roles[0], layout), cut_role(other, dim, roles[1], layout)], dim)


def tokens_of(role: str, layout: Layout) -> int:
    """Tokens of `role` on all ranks together."""
    words = layout.text[0] if layout.shared else sum(layout.text)
    pictures = sum(layout.image)
    return {"text": words, "image": pictures, "joint": words + pictures}[role]
