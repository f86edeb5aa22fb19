"""A trunk that runs on some of its image tokens: which ones, how tensors are cut and filled up again, what is read by traced code.

Text keeps all its tokens. A model that packs text and image before the trunk has its packed sequence cut as if it were image.

Shape legend: B batch, S image tokens, s those that are computed, W text tokens, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from chitu_hooks import BlockInputs, GenerationError, Streams
from chitu_hooks.call import map_tensors
from chitu_hooks.sites import DenoiserSite
from chitu_hooks.streams import pack, unpack
from chitu_hooks.tokens import AlignedCuts


class Fewer(NamedTuple):
    """The tokens that one denoiser call computes."""

    image: Tensor
    """(s,) int64, their places among the image tokens, in order."""
    joint: Tensor
    """(W + s,) int64, places of text and of these tokens in joint attention; `image` itself if there is no text stream."""
    tokens: int
    """Image tokens of the whole trunk."""
    text_first: bool
    """Order of text and image inside joint attention."""


def main_role(streams: Mapping[str, Any]) -> str:
    """Role of the stream that holds the image tokens."""
    return "image" if "image" in streams else "joint"


def fewer(image: Tensor, streams: Streams, order: tuple[str, ...]) -> Fewer:
    """The tokens at the places `image`, for a trunk that is entered with `streams`."""
    role = main_role(streams)
    tokens = streams[role].shape[1]
    text = streams.get("text") if role == "image" else None
    text_first = bool(order) and order[0] == "text"
    if text is None:
        return Fewer(image, image, tokens, text_first)
    words = torch.arange(text.shape[1], device=image.device)
    parts = (words, image + len(words)) if text_first else (image, words + tokens)
    return Fewer(image, changing(torch.cat(parts), 0), tokens, text_first)


def changing(tensor: Tensor, dim: int) -> Tensor:
    """`tensor`, with a word to torch.compile that the size of `dim` differs from step to step, so that one graph serves all."""
    torch._dynamo.maybe_mark_dynamic(tensor, dim)
    return tensor


def cuts(few: Fewer) -> AlignedCuts:
    """What cuts the aligned arguments of blocks to the tokens of `few`."""
    words = len(few.joint) - len(few.image)

    def cut(tensor: Tensor, dim: int, role: str) -> Tensor:
        if role == "text":
            return tensor
        return changing(tensor.index_select(dim, few.joint if role == "joint" else few.image), dim)

    return AlignedCuts({"image": few.tokens, "text": words, "joint": few.tokens + words}, cut)


def cut_added(name: str, places: Tensor, tokens: int) -> Callable[[Tensor], Tensor]:
    """What cuts the tensors (B, S, C) of the denoiser's argument `name`, which are added to the image between blocks.

    Raises:
        GenerationError: when called with a tensor that has not `tokens` tokens.
    """

    def cut(tensor: Tensor) -> Tensor:
        if tensor.shape[1] != tokens:
            raise GenerationError(
                f"{name} adds {tuple(tensor.shape)} to a trunk of {tokens} image tokens; correct trunk_arguments in the hook map"
            )
        return tensor.index_select(1, places)

    return cut


def image_part(tensor: Tensor, tokens: int, text_first: bool) -> Tensor:
    """The `tokens` image tokens of a stream that may hold text too, as a view."""
    return tensor.narrow(1, tensor.shape[1] - tokens if text_first else 0, tokens)


def filled(tensor: Tensor, few: Fewer, stale: Tensor) -> Tensor:
    """All tokens of a stream (B, W + s, C) or (B, s, C): those that were computed, and `stale` (B, S, C) for the others."""
    count = len(few.image)
    whole = stale.index_copy(1, few.image, image_part(tensor, count, few.text_first))
    return with_image(tensor, count, whole, few.text_first)


def with_image(tensor: Tensor, count: int, image: Tensor, text_first: bool) -> Tensor:
    """A stream whose `count` image tokens are replaced by `image`; the text tokens stay."""
    words = tensor.shape[1] - count
    if not words:
        return image
    return torch.cat((tensor[:, :words], image) if text_first else (image, tensor[:, count:]), 1)


class _MasksFit(TorchFunctionMode):
    """Cuts masks of all keys to the keys that there are."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not torch.nn.functional.scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))

        def call(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, *rest: Any, **named: Any) -> Any:
            if attn_mask is not None:
                attn_mask = attn_mask[..., : query.shape[-2], : key.shape[-2]]
            return function(query, key, value, attn_mask, *rest, **named)

        return call(*args, **(kwargs or {}))


def hold_fewer(model: torch.nn.Module, site: DenoiserSite, count: int) -> TorchFunctionMode:
    """Make a copy of the denoiser at `site` run its trunk on its first `count` image tokens, to count what that costs.

    Attention on the keys of the other tokens comes on top.

    Returns:
        The context to run it in.
    """
    state: dict[str, Any] = {}
    main = [stack for stack in site.stacks if not stack.refiner]

    def enter(block: Any, args: Any, kwargs: Any) -> Any:
        inputs = BlockInputs(block, args, kwargs)
        if "few" not in state:
            streams = inputs.streams()
            role = main_role(streams)
            places = torch.arange(count, device=streams[role].device)
            state["few"] = few = fewer(places, streams, order_of(site))
            state["cuts"], state["entry"] = cuts(few), streams[role]
            inputs.replace({role: streams[role].index_select(1, places)})
        state["cuts"].apply(inputs)
        return inputs.args, inputs.kwargs

    def leave(tensor: Tensor) -> Tensor:
        return filled(tensor, state["few"], torch.zeros_like(state["entry"]))

    def cut_what_is_added(_: Any, args: Any, kwargs: Any) -> Any:
        named = {site.arguments[name] for name in site.trunk_arguments}
        args = [map_tensors(value, first) if place in named else value for place, value in enumerate(args)]
        kwargs = {name: map_tensors(v, first) if name in site.trunk_arguments else v for name, v in kwargs.items()}
        return tuple(args), kwargs

    def first(tensor: Tensor) -> Tensor:
        return tensor[:, :count]

    model.register_forward_pre_hook(cut_what_is_added, with_kwargs=True)
    for stack in main:
        for block in stack.blocks:
            module = model.get_submodule(f"{stack.path}.{block.index}")
            module.register_forward_pre_hook(lambda _, a, k, block=block: enter(block, a, k), with_kwargs=True)
    if site.exit is not None:
        paths = {id(module): path for path, module in site.inner.named_modules()}
        exit = model.get_submodule(paths[id(site.exit.module)])
        exit.register_forward_pre_hook(lambda _, a: (leave(a[0]), *a[1:]))
        return _MasksFit()
    last = main[-1]

    def leave_block(_: Any, args: Any, result: Any) -> Any:
        outputs = unpack(result, last)
        role = main_role(outputs)
        return pack({**outputs, role: leave(outputs[role])}, last)

    model.get_submodule(f"{last.path}.{last.blocks[-1].index}").register_forward_hook(leave_block)
    return _MasksFit()


def order_of(site: DenoiserSite) -> tuple[str, ...]:
    """Order of text and image in the trunk."""
    return next((stack.order for stack in site.stacks if not stack.refiner and stack.order), ("text", "image"))
