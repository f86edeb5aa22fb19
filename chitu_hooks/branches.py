"""Which branch of guidance a denoiser call is, from evidence and never from counting calls.

The evidence is the `cache_context` that the pipeline entered, if any, the conditioning tensors (address, shape, strides)
and the call's plain arguments (`skip_layers` and the like). A pipeline that casts its conditioning anew at each step
shows new addresses every time; then the branch at the same place of the step is taken if its conditioning is equal,
value by value, and the report says that this comparison was needed.
"""

from __future__ import annotations

from typing import Any

import torch

from .call import Call
from .state import ACTIVE, Branch, Generation

PER_STEP = frozenset({"timestep", "timestep_r", "t", "return_dict", "sigma"})
"""Plain arguments that may differ from step to step, or mean nothing, and so tell no branches apart."""


def identify(generation: Generation, call: Call, conditioning: tuple[str, ...]) -> Branch:
    """The branch of `call`, made on its first appearance; counts the call's place within the step."""
    denoiser = call.denoiser
    ordinal = generation.ordinals.get(denoiser.name, 0)
    generation.ordinals[denoiser.name] = ordinal + 1
    context = ACTIVE.cache_context
    tensors = [call.argument(name) for name in conditioning]
    values = plain_arguments(call)
    # Where no conditioning is known, the place within the step is all there is to go by.
    place = ordinal if context is None and all(tensor is None for tensor in tensors) else None
    key = (denoiser.name, context, _address(tensors), values, place)
    branch = generation.branch_keys.get(key)
    if branch is None:
        branch = _same_by_value(generation, call, context, ordinal, tensors, values)
        if branch is None:
            branch = Branch(denoiser, context or f"branch {ordinal}", ordinal, values, tensors)
            _drop_older(generation, branch)
            generation.branches.append(branch)
        generation.branch_keys[key] = branch
    return branch


def _drop_older(generation: Generation, new: Branch) -> None:
    """Let go of what older branches in the place of `new` hold, all but the last of them.

    A prompt that is replaced once may come back; one that changes at every step would pile up a residual a step.
    """
    place = (new.denoiser, new.name, new.ordinal, new.values)
    older = [b for b in generation.branches if (b.denoiser, b.name, b.ordinal, b.values) == place]
    for branch in older[:-1]:
        if branch.residuals or branch.memory.spaces:
            branch.forget()
            generation.note(
                f"{new.name}: its conditioning keeps changing, so nothing could be reused from step to step"
            )


def plain_arguments(call: Call) -> tuple[Any, ...]:
    """Name and value of every argument that is a number, a word, None or a sequence of those."""
    found: list[tuple[str, Any]] = []
    for position, name in enumerate(call.denoiser.arguments):
        if name in PER_STEP:
            continue
        value = call.args[position] if position < len(call.args) else call.kwargs.get(name)
        if value is None or isinstance(value, (bool, int, float, str)):
            found.append((name, value))
        elif isinstance(value, (list, tuple)) and all(isinstance(v, (bool, int, float, str)) for v in value):
            found.append((name, tuple(value)))
    return tuple(found)


def _address(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.data_ptr(), value.shape, value.stride(), value.dtype)
    if isinstance(value, (list, tuple)):
        return tuple(_address(item) for item in value)
    return type(value).__name__ if value is not None else None


def _same_by_value(
    generation: Generation, call: Call, context: str | None, ordinal: int, tensors: list[Any], values: tuple[Any, ...]
) -> Branch | None:
    """The branch of an earlier step whose conditioning equals this one's. Only asked when the addresses are new."""
    for branch in reversed(generation.branches):
        if branch.denoiser is not call.denoiser or branch.values != values:
            continue
        if branch.name != context if context is not None else branch.ordinal != ordinal:
            continue
        if not _equal(branch.held, tensors):
            return None
        generation.note(
            f"{branch.name}: the pipeline makes new conditioning tensors at every step, so its branches were told apart by "
            "comparing values, once a call"
        )
        # One address a step would pile up: only the newest is of use, and it is held so that it stays unique.
        generation.branch_keys = {k: b for k, b in generation.branch_keys.items() if b is not branch}
        branch.held = tensors
        return branch
    return None


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(_equal(a, b) for a, b in zip(one, other))
    return one is None and other is None


def signature(call: Call) -> tuple[Any, ...]:
    """Shapes and presence of everything the denoiser was given: a residual is only good for calls that agree in it.

    A ControlNet that its guidance interval has switched off is often not absent but scaled to zero; whether its samples
    are all zero has to be read from the device, and counts as presence.
    """
    positional = tuple(_shape(value) for value in call.args)
    named = tuple((name, _shape(value)) for name, value in call.kwargs.items())
    acting = tuple(name for name in call.denoiser.arguments if "controlnet" in name and _acts(call.argument(name)))
    return positional, named, acting


def _acts(value: Any) -> bool:
    """Whether some tensor in `value` is not all zero."""
    if isinstance(value, torch.Tensor):
        return bool(value.any())
    if isinstance(value, dict):
        return any(_acts(item) for item in value.values())
    return isinstance(value, (list, tuple)) and any(_acts(item) for item in value)


def _shape(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape
    if isinstance(value, (list, tuple)):
        return tuple(_shape(item) for item in value)
    if isinstance(value, dict):
        return tuple((key, _shape(item)) for key, item in value.items())
    return type(value).__name__ if value is not None else None
