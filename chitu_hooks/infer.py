"""What can be derived without a hook map: denoisers and stacks from the modules, streams from the first computed call.

A stream is an argument of block i+1 that *is* an output of block i. Token roles (which rows are image, which text) are
not visible from that; what needs them asks for a map by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .call import BlockInputs, StackRun
from .errors import HookMapError
from .hook_map import HookMap, Stack
from .sites import argument_positions, attends

if TYPE_CHECKING:
    from .sites import BlockSite, Sites, StackSite

CONDITIONING = (
    "encoder_hidden_states",
    "cap_feats",
    "prompt",
    "text",
    "context",
    "pooled",
    "embeds",
    "class_labels",
    "token_id",
    "input_ids",
)
"""Parts of the names of arguments that tell the branches of guidance apart."""
NOT_CONDITIONING = ("mask", "lens", "indexes", "indices", "pos", "length")
"""Parts of the names of arguments that only describe those."""
NOT_DENOISERS = (
    "vae",
    "text_encoder",
    "image_encoder",
    "tokenizer",
    "safety_checker",
    "controlnet",
    "vision",
    "vocoder",
)
TAKES_TIME = ("t", "sigma")
TIME_ENDS = ("timestep", "timesteps", "timestep_ratio", "_time")
"""Names, and ends of names, of the argument that tells a denoiser how noisy its sample is."""
BEFORE_THE_TRUNK = ("text_", "txt_", "refiner")
"""Parts of the names of stacks that see one kind of tokens before the trunk begins: what `Stack.refiner` says in a map."""
GIVE_UP_AFTER = 2
"""Computed calls after which a stack whose streams are still unknown is left alone."""


def infer_map(pipe: Any) -> HookMap:
    """A hook map from the modules of `pipe` alone.

    Raises:
        HookMapError: no component takes a timestep; the message lists what was looked at.
    """
    components = {key: value for key, value in pipe.components.items() if isinstance(value, nn.Module)}
    denoisers = {name: module for name, module in components.items() if _is_denoiser(name, module)}
    if not denoisers:
        looked = (
            ", ".join(f"{name} ({type(module).__name__})" for name, module in components.items()) or "no module at all"
        )
        raise HookMapError(
            f"{type(pipe).__name__} has no hook map and none could be inferred: none of its components takes a timestep "
            f"({looked}); pass hook_map=HookMap(name=…, pipelines=({type(pipe).__name__!r},), denoisers=(…))"
        )
    first = next(iter(denoisers.values()))
    first = getattr(first, "_orig_mod", first)
    conditioning = tuple(name for name in argument_positions(first) if _is_conditioning(name))
    return HookMap(
        name=type(first).__name__,
        pipelines=(type(pipe).__name__,),
        denoisers=tuple(denoisers),
        stacks=None,
        conditioning=conditioning,
        source="inferred",
    )


def _is_conditioning(name: str) -> bool:
    return any(part in name for part in CONDITIONING) and not any(part in name for part in NOT_CONDITIONING)


def _is_denoiser(name: str, module: nn.Module) -> bool:
    if name.startswith(NOT_DENOISERS):
        return False
    arguments = argument_positions(getattr(module, "_orig_mod", module))
    return any(argument in TAKES_TIME or argument.endswith(TIME_ENDS) for argument in arguments)


def infer_stacks(denoiser: nn.Module) -> tuple[Stack, ...]:
    """Every ModuleList directly below `denoiser` that may be a stack; `resolve` finds out which are.

    A UNet's down and up blocks are none: they hand on skip connections, so UNets have no trunk. Neither is a list of
    modules without attention, such as projections that each take an input of their own.
    """
    if "UNet" in type(denoiser).__name__:
        return ()
    return tuple(
        Stack(name, streams={}, returns=(), order=(), refiner=any(part in name for part in BEFORE_THE_TRUNK))
        for name, child in denoiser.named_children()
        if isinstance(child, nn.ModuleList)
        and len(child)
        and len({type(block) for block in child}) == 1
        and any(attends(module) for module in child[0].modules())
    )


# -- during the first computed call ------------------------------------------------------------------------------------


def snapshot(inputs: BlockInputs) -> dict[str, Any]:
    """Argument name -> a copy of the tensor, since the block may work in place."""
    return {
        name: value.clone()
        for name in inputs.block.arguments
        if isinstance(value := inputs.get(name), torch.Tensor)
    }  # fmt: skip


def record(block: BlockSite, run: StackRun, inputs: BlockInputs, result: Any, entry: dict[str, Any] | None) -> None:
    """Remember what the first block of an unresolved stack got, and what this one got and returned."""
    given = {name: inputs.get(name) for name in block.arguments}
    run.probe = (entry if entry is not None else run.probe[0], given, result)


def resolve(block: BlockSite, run: StackRun, inputs: BlockInputs) -> bool:
    """Whether the stack's streams are now known: outputs of the block before that are arguments of this one."""
    if run.probe is None:
        return False
    entry, given, result = run.probe
    outputs = result if isinstance(result, (tuple, list)) else (result,)
    if outputs is result and len(outputs) == 1:
        return False  # one role stands for a bare tensor
    returns = _carriers(outputs, {name: inputs.get(name) for name in block.arguments}, given)
    if returns is None:
        return False
    _settle(block.stack, returns)
    run.entry = {name: entry.get(name) for name in returns}
    return True


def _carriers(outputs: Sequence[Any], values: dict[str, Any], given: dict[str, Any]) -> tuple[str, ...] | None:
    """For each output the argument that carries it on, or None if that is not plain for each.

    An argument carries an output that it *is*. Of those left, an argument carries the output of its shape if it is the
    only one of that shape that the block before was not given as well: the model added a ControlNet's sample to the
    output, or cut tokens off and put others in their place.
    """
    if not all(isinstance(output, torch.Tensor) for output in outputs):
        return None
    carriers = {
        place: name for place, output in enumerate(outputs) for name, value in values.items() if value is output
    }
    for place, output in enumerate(outputs):
        if place in carriers:
            continue
        new = [
            name
            for name, value in values.items()
            if name not in carriers.values()
            and isinstance(value, torch.Tensor)
            and value.shape == output.shape
            and value is not given.get(name)
        ]
        if len(new) == 1:
            carriers[place] = new[0]
    names = tuple(carriers[place] for place in sorted(carriers))
    return names if len(set(names)) == len(outputs) == len(names) else None


def resolve_single(block: BlockSite, run: StackRun, result: Any) -> bool:
    """A stack of one block has no next one: its stream is the first argument, if it returns one tensor of that shape."""
    entry = run.probe[0]
    name = next(iter(block.arguments))
    if not isinstance(result, torch.Tensor) or name not in entry or entry[name].shape != result.shape:
        return False
    _settle(block.stack, (name,))
    run.entry = {name: entry[name]}
    return True


def _settle(stack: StackSite, returns: tuple[str, ...]) -> None:
    stack.returns = returns
    stack.streams = {name: name for name in returns}


def not_inferred(sites: Sites, hook_map: HookMap) -> list[str]:
    """What an inferred map does not say about `sites`, each with the line of a map that would say it."""
    if hook_map.source != "inferred":
        return []
    lines = []
    if hook_map.guidance == "unknown":
        lines.append('how guidance is run: guidance="batched" or guidance="sequential"')
    for stack in sites.stacks:
        if stack.refiner or stack.aligned is not None:
            continue
        streams = set((stack.streams or {}).values())
        named = [name for name in stack.blocks[0].arguments if name not in streams]
        lines.append(
            f"which of {', '.join(named)} of {stack.denoiser.name}.{stack.path} have one entry a token: "
            f'Stack("{stack.path}", …, aligned={{argument: "image", "text" or "joint"}})'
        )
    return lines
