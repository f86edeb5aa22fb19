"""A draft of a hook map, as far as modules and source tell, and its text as an adapter file."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from chitu_hooks import HookMap, Stack

from .source import PipelineSource, calls, dotted, tree_of

TEXT_NAMES = ("encoder_hidden", "context", "txt", "text", "cap", "prompt")
"""Beginnings of the names under which blocks take text tokens."""


@dataclass(frozen=True)
class Draft:
    """A hook map and what is still open about it."""

    hook_map: HookMap
    questions: tuple[str, ...] = ()
    """What a person should fill in or confirm, each with where to look."""
    evidence: tuple[str, ...] = ()
    """How each thing in the map is known."""


def read_draft(pipe: Any, found: HookMap, name: str) -> Draft:
    """The map `found` by inference, completed from the source of the blocks and of the pipeline.

    Args:
        pipe: the pipeline, with or without weights.
        found: the inferred map; its stacks have no streams yet.
        name: the name of the family.
    """
    questions: list[str] = []
    evidence: list[str] = []
    first = next(module for key in found.denoisers if isinstance(module := getattr(pipe, key, None), nn.Module))
    stacks: list[Stack] = []
    for stack in found.stacks or ():
        read = _read_stack(first, stack, bool(stacks), questions, evidence)
        if read is not None:
            stacks.append(read)
    order = read_order(first)
    if any(len(stack.streams) > 1 or "joint" in stack.streams for stack in stacks):
        if order:
            stacks = [dataclasses.replace(s, order=order) if not s.refiner else s for s in stacks]
            evidence.append(f"token order {', '.join(order)}: read from where image and text are concatenated")
        else:
            questions.append(
                "token order: whether text or image tokens come first in joint attention cannot be read from the source; "
                "order=('text', 'image') is taken for it"
            )
    guidance = read_guidance(PipelineSource(type(pipe), found.denoisers))
    evidence.append(f"guidance {guidance}: from the loop of {type(pipe).__name__}.__call__")
    hook_map = dataclasses.replace(found, name=name, stacks=tuple(stacks), guidance=guidance)
    return Draft(hook_map, tuple(questions), tuple(evidence))


def _read_stack(
    denoiser: nn.Module, stack: Stack, later: bool, questions: list[str], evidence: list[str]
) -> Stack | None:
    """`stack` with its streams, if the source of its blocks tells; None if it is no stack of blocks."""
    modules = denoiser.get_submodule(stack.path)
    block = next(iter(modules.children()))
    cls = type(block)
    if stack.streams:
        return stack
    if not any(callable(getattr(module, "processor", None)) for module in block.modules()):
        evidence.append(f"{stack.path} left out: {cls.__name__} holds no attention")
        return None
    returned = read_returns(cls)
    if not returned:
        questions.append(
            f"{stack.path}: what {cls.__name__} returns cannot be read from its source; name its streams and returns, or leave "
            "them empty, and they are inferred in each process from the first computed call"
        )
        return Stack(stack.path, streams={}, returns=())
    roles = tuple(_role(argument, cls, returned, later, stack.path, questions) for argument in returned)
    if len(set(roles)) < len(roles):
        questions.append(
            f"{stack.path}: {cls.__name__} returns {', '.join(returned)}, more streams than image and text; a map has words for "
            "those two, so its streams are left to inference"
        )
        return Stack(stack.path, streams={}, returns=())
    evidence.append(f"{stack.path}: {cls.__name__} returns {', '.join(returned)}: read from its source")
    return Stack(stack.path, dict(zip(roles, returned)), roles, refiner="refiner" in stack.path)


def read_returns(cls: type) -> tuple[str, ...]:
    """The arguments of a block's forward that it returns, in order; empty if its source does not say so plainly."""
    forward = inspect.unwrap(cls.forward)  # type: ignore[attr-defined]
    arguments = set(inspect.signature(forward).parameters)
    forms = set()
    for node in ast.walk(tree_of(forward)):
        if isinstance(node, ast.Return) and node.value is not None:
            items = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            names = tuple(item.id for item in items if isinstance(item, ast.Name) and item.id in arguments)
            if len(names) != len(items) or len(set(names)) != len(names):
                return ()
            forms.add(names)
    return forms.pop() if len(forms) == 1 else ()


def _role(argument: str, cls: type, returned: Sequence[str], later: bool, path: str, questions: list[str]) -> str:
    if argument.startswith(TEXT_NAMES):
        return "text"
    takes = inspect.signature(cls.forward).parameters  # type: ignore[attr-defined]
    crosses = any(name.startswith(TEXT_NAMES) and not name.endswith("mask") for name in takes)
    if len(returned) > 1 or crosses:
        return "image"
    role = "text" if path.startswith(TEXT_NAMES) else "joint" if later else "image"
    questions.append(
        f"{path}: {argument} is taken for the {role} stream; say 'joint' if image and text are in one tensor there, "
        "'text' if only text is, and refiner=True if the blocks run before the trunk on part of the tokens"
    )
    return role


def read_order(denoiser: nn.Module) -> tuple[str, ...]:
    """Token order in joint attention, from the concatenations of an ``encoder_…`` tensor and another; empty if unclear."""
    processors = {type(m.processor) for m in denoiser.modules() if callable(getattr(m, "processor", None))}
    found = set()
    for thing in (*sorted(processors, key=lambda cls: cls.__name__), inspect.unwrap(type(denoiser).forward)):
        for name, node in calls(tree_of(thing)):
            items = node.args[0].elts if node.args and isinstance(node.args[0], ast.List | ast.Tuple) else []
            names = [item.id if isinstance(item, ast.Name) else "" for item in items]
            if name.endswith(("torch.cat", "torch.concat")) and len(names) == 2 and all(names):
                text = [word.startswith("encoder") for word in names]
                if sum(text) == 1:
                    found.add(("text", "image") if text[0] else ("image", "text"))
    return found.pop() if len(found) == 1 else ()


def read_guidance(source: PipelineSource) -> Any:
    """How the pipeline's loop runs classifier-free guidance: see `HookMap.guidance`."""
    nodes = [node for loop in source.loops for name, node in calls(loop) if source.is_denoiser(name)]
    plain = [node for node in nodes if not any(keyword.arg == "guidance" for keyword in node.keywords)]
    halves = any(
        isinstance(node, ast.Call) and dotted(node.func).endswith(".chunk")
        for loop in source.loops
        for node in ast.walk(loop)
    )
    if len(nodes) > 1:
        return "sequential"
    if halves:
        return "batched"
    return "embedded" if nodes and not plain else "unknown"


# -- as text -----------------------------------------------------------------------------------------------------------


def map_text(draft: Draft, about: str) -> str:
    """The adapter file of a draft: only data, and its open questions as comments.

    Args:
        draft: the map.
        about: the first line of the file, a sentence.
    """
    found = draft.hook_map
    lines = [
        f'"""{about}"""',
        "",
        "from chitu_hooks import HookMap, Stack" if found.stacks else "from chitu_hooks import HookMap",
        "",
    ]
    for question in draft.questions:
        lines += textwrap.wrap(f"Fill in: {question}", 118, initial_indent="# ", subsequent_indent="# ")
    lines += ["HOOK_MAP = HookMap(", f'    name="{found.name}",', f"    pipelines={_words(found.pipelines)},"]
    if found.denoisers != ("transformer",):
        lines.append(f"    denoisers={_words(found.denoisers)},")
    if not found.stacks:
        lines.append("    stacks=(),")
    else:
        lines += ["    stacks=(", *(line for stack in found.stacks for line in _stack_text(stack)), "    ),"]
    if found.conditioning != ("encoder_hidden_states",):
        lines.append(f"    conditioning={_words(found.conditioning)},")
    if found.guidance != "unknown":
        lines.append(f'    guidance="{found.guidance}",')
    return "\n".join([*lines, ")", ""])


def _stack_text(stack: Stack) -> list[str]:
    pairs = ", ".join(f'"{role}": "{argument}"' for role, argument in stack.streams.items())
    lines = [
        f'            "{stack.path}",',
        f"            streams={{{pairs}}},",
        f"            returns={_words(stack.returns)},",
    ]
    if stack.order != ("text", "image"):
        lines.append(f"            order={_words(stack.order)},")
    if stack.refiner:
        lines.append("            refiner=True,")
    if stack.aligned is not None:
        lines += _pairs_text("aligned", stack.aligned)
    return ["        Stack(", *lines, "        ),"]


def _pairs_text(field: str, pairs: Mapping[str, str]) -> list[str]:
    """A field of word pairs, on one line if it is short."""
    inner = ", ".join(f'"{key}": "{value}"' for key, value in pairs.items())
    if len(inner) < 90:
        return [f"            {field}={{{inner}}},"]
    rows = [f'                "{key}": "{value}",' for key, value in pairs.items()]
    return [f"            {field}={{", *rows, "            },"]


def _words(words: Sequence[str]) -> str:
    quoted = ", ".join(f'"{word}"' for word in words)
    return f"({quoted},)" if len(words) == 1 else f"({quoted})"
