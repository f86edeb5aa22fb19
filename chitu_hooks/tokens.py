"""Cutting block arguments that have one entry a token, for features that let a trunk run on a part of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from .call import BlockInputs
from .errors import GenerationError
from .feature import Refusal
from .hook_map import ALIGNED, HookMap
from .sites import Sites, StackSite


class AlignedCuts:
    """Cuts, at every block of one trunk, the arguments that the map names in `Stack.aligned`.

    Args:
        tokens: role -> number of tokens in the whole trunk.
        cut: ``cut(tensor, dim, role)`` returns the part of a tensor with one entry a token of `role` along `dim`.
    """

    def __init__(self, tokens: Mapping[str, int], cut: Callable[[Tensor, int, str], Tensor]) -> None:
        self.tokens = tokens
        self.cut = cut
        self._known: dict[Any, Any] = {}
        self._named: dict[str, tuple[str, str]] = {}
        """Key of `Stack.aligned` -> the argument and the path within it."""

    def apply(self, inputs: BlockInputs) -> None:
        """Put the cut arguments in place of the whole ones. Blocks are mostly handed the same objects: each is cut once a call.

        Raises:
            GenerationError: an argument has not the size that the map says it has.
        """
        for key, spec in (inputs.block.stack.aligned or {}).items():
            named = self._named.get(key)
            if named is None:
                name, _, path = key.partition(".")
                named = self._named[key] = name, path
            value = inputs.get(named[0])
            if value is None:
                continue
            known = self._known.get((id(value), key))
            if known is None:  # only then is it named, for messages
                cut = self._cut(value, named[1], spec, f"{inputs.block.path}: {key}", key)
            else:
                cut = known[1]
            inputs.set(named[0], cut)

    def _cut(self, value: Any, path: str, spec: str, where: str, key: str) -> Any:
        """The part of `value` at `path`, cut; also of what is new for each block and holds the same tensors."""
        known = self._known.get((id(value), key))
        if known is not None:
            return known[1]
        if path:
            first, _, rest = path.partition(".")
            place = int(first)
            item = self._cut(value[place], rest, spec, where, f"{key}/{rest}")
            result: Any = type(value)((*value[:place], item, *value[place + 1 :]))
        elif isinstance(value, Tensor):
            result = self._cut_tensor(value, spec, where)
        else:
            result = value
        self._known[id(value), key] = (value, result)  # held, so that no other object takes its address
        return result

    def _cut_tensor(self, value: Tensor, spec: str, where: str) -> Tensor:
        role, dim, dims = ALIGNED.fullmatch(spec).groups()  # type: ignore[union-attr]
        if dims is not None and value.dim() != int(dims):
            return value
        tokens = self.tokens[role]
        candidates = (0, 1) if dim is None else (int(dim),)
        found = [d for d in candidates if d < value.dim() and value.shape[d] == tokens]
        if len(found) != 1:
            raise GenerationError(
                f"{where} is {tuple(value.shape)} and is to be cut into shares of {tokens} {role} tokens, which "
                f"{'two dimensions fit' if found else 'no dimension fits'}; correct aligned in the hook map, as in '{role}@0'"
            )
        return self.cut(value, found[0], role)


def main_stacks(sites: Sites) -> Iterator[StackSite]:
    """The stacks of the trunk."""
    return (stack for stack in sites.stacks if not stack.refiner)


def refuse_cutting(sites: Sites, hook_map: HookMap, remedy: str) -> Refusal | None:
    """Why the trunk cannot run on a part of its tokens: aligned arguments are not known, or blocks look at neighbours.

    Args:
        sites: of the pipeline.
        hook_map: that they were found by.
        remedy: what can be used instead.
    """
    for stack in main_stacks(sites):
        where = f"{stack.denoiser.name}.{stack.path}"
        if stack.aligned is None or not stack.streams:
            return Refusal(
                f"the hook map {hook_map.name!r} ({hook_map.source}) does not say which arguments of {where} have one "
                "entry a token",
                "`chitu adapt` finds them and writes a map; or give that stack aligned={argument: role} in one of your own",
            )
        for block in stack.blocks:
            for name, module in block.module.named_modules():
                if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
                    return Refusal(
                        f"{where}.{block.index}.{name} is a convolution, which needs tokens that would not be there",
                        remedy,
                    )
    return None
