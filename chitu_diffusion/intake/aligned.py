"""Block arguments with one entry a token, such as rotary tables: what context parallelism has to cut with the streams.

They are recognised by size, which says nothing where sizes coincide. So a stack is settled only if every length is long and
unlike every other size in sight; otherwise the question is put to a person.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from chitu_hooks import Stack

SHORTEST = 16
"""Tokens; fewer are easily some other size: six modulation vectors, four axes."""


def with_aligned(stack: Stack, given: Mapping[str, Any], questions: list[str]) -> Stack:
    """`stack` with its token-aligned arguments, if `given` shows them beyond doubt.

    Args:
        stack: with its streams.
        given: argument -> value of the first block's first call.
        questions: gets what has to be decided by a person.
    """
    if not stack.streams or stack.refiner:
        return stack
    others = {
        name: value
        for name, value in given.items()
        if name not in stack.streams.values()
        and name != "attention_mask"  # it reaches the attention seam, which cuts it
    }
    lengths = token_counts(stack, given)
    leaves = [(key, tensor) for name, value in others.items() for key, tensor in _leaves(name, value)]
    doubt = _doubt(stack, given, lengths)
    found = {key: matches for key, tensor in leaves if (matches := _matches(tensor, lengths))}
    unclear = sorted(key for key, matches in found.items() if len(matches) > 1)
    if found and (doubt or unclear):
        reason = doubt or f"{unclear[0]} fits in more than one way"
        names = ", ".join(sorted(found))
        questions.append(
            f"{stack.path}: {names} may have one entry a token, which context parallelism has to know; {reason}; fill in "
            f"aligned={{…}}, or make a call of at least {SHORTEST} text tokens, other than channels, and more image tokens"
        )
        return stack
    return dataclasses.replace(stack, aligned={key: matches[0] for key, matches in found.items()})


def token_counts(stack: Stack, given: Mapping[str, Any]) -> dict[str, int]:
    """Role -> tokens: of the streams, and of both together."""
    counts = {role: given[name].shape[1] for role, name in stack.streams.items() if given[name].dim() == 3}
    if {"image", "text"} <= counts.keys():
        counts["joint"] = counts["image"] + counts["text"]
    return counts


def _leaves(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor under its argument's name, the tensors of a tuple or list under ``name.0``, ``name.1``."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            if isinstance(item, torch.Tensor):
                yield f"{name}.{place}", item


def _matches(tensor: torch.Tensor, lengths: Mapping[str, int]) -> list[str]:
    """``role@dimension`` for each dimension that is as long as a role has tokens; the last of three or more is channels."""
    dims = tensor.shape[:-1] if tensor.dim() > 2 else tensor.shape
    return [f"{role}@{dim}" for role, length in lengths.items() for dim, size in enumerate(dims) if size == length]


def _doubt(stack: Stack, given: Mapping[str, Any], lengths: Mapping[str, int]) -> str:
    """Why sizes cannot tell here, or nothing."""
    if len(set(lengths.values())) < len(lengths):
        return f"image and text have {lengths.get('image')} tokens each"
    short = [role for role, length in lengths.items() if length < SHORTEST]
    if short:
        return f"the call had {lengths[short[0]]} {short[0]} tokens only"
    streams = [given[name] for name in stack.streams.values()]
    channels = {stream.shape[-1] for stream in streams} | {stream.shape[0] for stream in streams}
    same = [role for role, length in lengths.items() if length in channels]
    return f"there are as many {same[0]} tokens as channels" if same else ""
