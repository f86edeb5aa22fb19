"""Which block arguments have one entry a token, and of which tokens: seen in calls of another size and text length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from tiny import ALL, build, run

from chitu_hooks import patch
from chitu_hooks.call import BlockInputs
from chitu_hooks.sites import BlockSite

Shapes = dict[str, dict[str, tuple[int, ...]]]
"""Stack path -> argument, or item of one -> shape, at the first block of the stack."""


def entry_shapes(name: str, call: Callable[[Any], Any]) -> Shapes:
    """The shapes of everything that the first block of each stack is given in the first denoiser call of `call`."""
    pipe, found = build(name), Shapes()
    with patch(pipe) as handle:
        stacks = handle.sites.denoisers[0].stacks

    def keep(block: BlockSite) -> Callable[..., None]:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            inputs = BlockInputs(block, args, kwargs)
            leaves = {path: tensor.shape for n in block.arguments for path, tensor in tensors(inputs.get(n), n)}
            found.setdefault(block.stack.path, leaves)

        return hook

    for stack in stacks:
        stack.blocks[0].module.register_forward_pre_hook(keep(stack.blocks[0]), with_kwargs=True)
    call(pipe)
    return found


def tensors(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (list, tuple)):
        for place, item in enumerate(value):
            yield from tensors(item, f"{path}.{place}")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors(item, f"{path}.{key}")


def token_arguments(name: str, length: int = 6, longer: int = 9) -> dict[str, dict[str, str]]:
    """Stack path -> argument -> role and dimension, as in `Stack.aligned`; streams are among them.

    A dimension that grows with the picture counts image tokens, one that grows with the text counts text tokens, and one
    that grows with both counts joint tokens. Arguments with two such dimensions, square masks, are left out.
    """
    base = entry_shapes(name, lambda pipe: run(name, pipe, 2, length=length))
    larger = entry_shapes(name, lambda pipe: run(name, _roomy(pipe), 2, length=length, **ALL[name].bigger))
    text = entry_shapes(name, lambda pipe: run(name, pipe, 2, length=longer))
    found: dict[str, dict[str, str]] = {}
    for path, leaves in base.items():
        roles = {leaf: _role(shape, larger[path].get(leaf), text[path].get(leaf)) for leaf, shape in leaves.items()}
        found[path] = {leaf: role for leaf, role in roles.items() if role}
    return found


def _roomy(pipe: Any) -> Any:
    """`pipe` with a larger default size: HiDream rounds every size to that area."""
    if hasattr(pipe, "default_sample_size"):
        pipe.default_sample_size *= 2
    return pipe


def _role(base: tuple[int, ...], larger: tuple[int, ...] | None, longer: tuple[int, ...] | None) -> str:
    by_size, by_text = _grown(base, larger), _grown(base, longer)
    dims = by_size | by_text
    if len(dims) != 1:
        return ""
    role = "joint" if by_size and by_text else "image" if by_size else "text"
    return f"{role}@{min(dims)}"


def _grown(base: tuple[int, ...], other: tuple[int, ...] | None) -> set[int]:
    if other is None or len(other) != len(base):
        return set()
    return {dim for dim, (a, b) in enumerate(zip(base, other)) if a != b}
