"""Sites: the hookable places found in one pipeline by following its hook map."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .errors import HookMapError, nearest
from .hook_map import HookMap, Stack


@dataclass(eq=False)
class BlockSite:
    """One block of a stack."""

    stack: StackSite
    index: int
    """Place in the stack, from 0."""
    module: nn.Module
    arguments: dict[str, int]
    """Argument name of the block's forward -> position."""

    @property
    def path(self) -> str:
        return f"{self.stack.path}.{self.index}"


@dataclass(eq=False)
class StackSite:
    """One stack; `streams` and `returns` are None while an inferred stack has not been seen running."""

    denoiser: DenoiserSite
    number: int
    """Place among the stacks of the denoiser; with an inferred map the order of the attributes, not of the calls."""
    path: str
    blocks: list[BlockSite]
    streams: dict[str, str] | None
    """Role -> argument name; in an inferred stack the argument name is the role."""
    returns: tuple[str, ...] | None
    refiner: bool = False
    order: tuple[str, ...] = ("text", "image")
    aligned: Mapping[str, str] | None = None
    tries: int = 0
    """Computed calls in which the streams could not be inferred."""

    @property
    def last(self) -> int:
        return len(self.blocks) - 1


@dataclass(eq=False)
class AttentionSite:
    """A module that owns an attention processor, or computes attention by itself."""

    path: str
    module: nn.Module
    stack: StackSite | None
    layer: torch.Tensor
    """0-d int64 tensor with the number of the layer, so that traced code can tell layers apart without a graph each."""
    reachable: bool = True
    """False if the processor calls neither `dispatch_attention_fn` nor `scaled_dot_product_attention`, or if there is none:
    the module computes attention in its own code."""


@dataclass(eq=False)
class ExitSite:
    """The module that takes the trunk's output as its first argument."""

    denoiser: DenoiserSite
    module: nn.Module
    argument: str
    role: str
    """Role of the stream that it takes."""


@dataclass(eq=False)
class DenoiserSite:
    """One denoiser: the outermost module that the pipeline calls, an `OptimizedModule` included."""

    name: str
    module: nn.Module
    arguments: dict[str, int]
    stacks: list[StackSite] = field(default_factory=list)
    attention: list[AttentionSite] = field(default_factory=list)
    exit: ExitSite | None = None
    """None: the trunk ends with the last block called."""
    trunk_arguments: tuple[str, ...] = ()
    """As in the hook map."""

    @property
    def inner(self) -> nn.Module:
        """The module itself, without the wrapper of ``torch.compile(module)``."""
        return getattr(self.module, "_orig_mod", self.module)

    @property
    def compiled_whole(self) -> bool:
        """Whether the whole denoiser is one compiled region, so that blocks inside it cannot be seen."""
        from .seam import Shim

        call = vars(self.module).get("_compiled_call_impl")
        while isinstance(call, Shim):
            call = call.inner
        return self.module is not self.inner or callable(call)


@dataclass(eq=False)
class Sites:
    """Everything hookable in one pipeline."""

    pipe: Any
    denoisers: list[DenoiserSite]

    @property
    def stacks(self) -> list[StackSite]:
        return [stack for denoiser in self.denoisers for stack in denoiser.stacks]

    @property
    def blocks(self) -> list[BlockSite]:
        return [block for stack in self.stacks for block in stack.blocks]

    @property
    def exits(self) -> list[ExitSite]:
        return [denoiser.exit for denoiser in self.denoisers if denoiser.exit is not None]

    @property
    def attention(self) -> list[AttentionSite]:
        return [site for denoiser in self.denoisers for site in denoiser.attention]


def argument_positions(module: nn.Module) -> dict[str, int]:
    """Argument name -> position of the module's own forward, whatever has been put in front of it."""
    parameters = inspect.signature(type(module).forward).parameters
    names = [name for name, p in parameters.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return {name: position for position, name in enumerate(names[1:])}


def find_sites(pipe: Any, hook_map: HookMap) -> Sites:
    """Follow `hook_map` through `pipe`.

    Raises:
        HookMapError: a name in the map is not there; the message has the dotted name and the nearest that are.
    """
    denoisers = []
    for name in hook_map.denoisers:
        if not hasattr(pipe, name):
            components = [key for key, value in pipe.components.items() if isinstance(value, nn.Module)]
            raise HookMapError(
                f"hook map {hook_map.name!r}: {type(pipe).__name__} has no {name!r}{nearest(name, components)}"
            )
        module = getattr(pipe, name)
        if isinstance(module, nn.Module):
            denoisers.append(_denoiser_site(name, module, hook_map))
    if not denoisers:
        raise HookMapError(
            f"hook map {hook_map.name!r}: every denoiser of {type(pipe).__name__} ({', '.join(hook_map.denoisers)}) is None; "
            "load one before patching"
        )
    return Sites(pipe, denoisers)


def _denoiser_site(name: str, module: nn.Module, hook_map: HookMap) -> DenoiserSite:
    site = DenoiserSite(name, module, {}, trunk_arguments=hook_map.trunk_arguments)
    site.arguments = argument_positions(site.inner)
    for argument in (*hook_map.conditioning, *hook_map.trunk_arguments):
        if argument not in site.arguments and hook_map.source != "inferred":
            raise HookMapError(
                f"hook map {hook_map.name!r}: {name}.forward ({type(site.inner).__name__}) has no argument "
                f"{argument!r}{nearest(argument, site.arguments)}"
            )
    for stack in hook_map.stacks or ():
        if hook_map.source == "inferred" and not hasattr(site.inner, stack.path):
            continue  # inferred from the first denoiser; a second one of another class has other stacks
        site.stacks.append(_stack_site(site, stack, hook_map))
    if hook_map.exit:
        site.exit = _exit_site(site, hook_map)
    owners = {id(block.module): stack for stack in site.stacks for block in stack.blocks}
    site.attention = _attention_sites(site.inner, owners)
    return site


def _stack_site(denoiser: DenoiserSite, stack: Stack, hook_map: HookMap) -> StackSite:
    modules = _follow(denoiser, stack.path, hook_map)
    site = StackSite(
        denoiser,
        len(denoiser.stacks),
        stack.path,
        [],
        dict(stack.streams) or None,
        stack.returns or None,
        stack.refiner,
        stack.order,
        stack.aligned,
    )
    named = [*stack.streams.values(), *(key.partition(".")[0] for key in stack.aligned or ())]
    for index, module in enumerate(modules):
        arguments = argument_positions(module)
        for argument in named:
            if argument not in arguments:
                raise HookMapError(
                    f"hook map {hook_map.name!r}: {denoiser.name}.{stack.path}.{index} ({type(module).__name__}) has no "
                    f"argument {argument!r}{nearest(argument, arguments)}"
                )
        site.blocks.append(BlockSite(site, index, module, arguments))
    return site


def _exit_site(denoiser: DenoiserSite, hook_map: HookMap) -> ExitSite:
    module: nn.Module = denoiser.inner
    for part in hook_map.exit.split("."):
        child = dict(module.named_children()).get(part)
        if child is None:
            names = [name for name, _ in denoiser.inner.named_children()]
            raise HookMapError(
                f"hook map {hook_map.name!r}: {denoiser.name} ({type(denoiser.inner).__name__}) has no module "
                f"{hook_map.exit!r} at the end of its trunk{nearest(hook_map.exit, names)}"
            )
        module = child
    streams = denoiser.stacks[-1].streams if denoiser.stacks else None
    argument = next(iter(argument_positions(module)), "")
    return ExitSite(
        denoiser, module, argument, hook_map.exit_role or ("image" if "image" in (streams or {}) else "joint")
    )


def _follow(denoiser: DenoiserSite, path: str, hook_map: HookMap) -> nn.ModuleList:
    """The ModuleList at dotted `path` below the denoiser."""
    module: nn.Module = denoiser.inner
    for part in path.split("."):
        child = dict(module.named_children()).get(part)
        if child is None:
            lists = [name for name, m in denoiser.inner.named_modules() if isinstance(m, nn.ModuleList)]
            raise HookMapError(
                f"hook map {hook_map.name!r}: {denoiser.name} ({type(denoiser.inner).__name__}) has no stack "
                f"{path!r}{nearest(path, lists)}"
            )
        module = child
    if not isinstance(module, nn.ModuleList) or not len(module):
        raise HookMapError(
            f"hook map {hook_map.name!r}: {denoiser.name}.{path} is {type(module).__name__} of "
            f"{len(list(module.children()))} modules; a stack is a ModuleList of at least one block"
        )
    return module


def attends(module: nn.Module) -> bool:
    """Whether `module` computes attention, through a processor or by itself."""
    from .processors import reaches_attention

    return callable(getattr(module, "processor", None)) or reaches_attention(type(module))


def _attention_sites(root: nn.Module, owners: dict[int, StackSite]) -> list[AttentionSite]:
    """Every module below `root` that computes attention, in the order of the module tree."""
    from .processors import reaches_attention

    sites: list[AttentionSite] = []

    def visit(module: nn.Module, path: str, stack: StackSite | None) -> None:
        stack = owners.get(id(module), stack)
        processor = getattr(module, "processor", None)
        if attends(module):
            reachable = callable(processor) and reaches_attention(type(processor))
            sites.append(AttentionSite(path, module, stack, torch.tensor(len(sites)), reachable))
        for name, child in module.named_children():
            if child is not processor:  # some processors are modules, with weights of their own
                visit(child, f"{path}.{name}" if path else name, stack)

    visit(root, "", None)
    return sites
