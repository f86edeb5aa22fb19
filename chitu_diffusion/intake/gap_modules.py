"""Gap rules for the modules: denoisers with their attention, the scheduler, the VAE, and everything beside them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from chitu_hooks.sites import DenoiserSite

from .gap import ATTENTION, COVERED, SHAPE, STAGE, Piece
from .source import PipelineSource, calls, count, place_in_file, tree_of, vars_of

MIXES_TOKENS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
OWN_ATTENTION = {"scaled_dot_product_attention", "dispatch_attention_fn", "softmax", "baddbmm"}
"""Names in a forward that computes attention by itself."""
ENCODERS = ("text_encoder", "tokenizer")


# -- the denoiser ------------------------------------------------------------------------------------------------------


def denoiser_pieces(denoiser: DenoiserSite) -> Iterator[Piece]:
    """One piece for each class of module and processor in the denoiser."""
    blocks = {id(block.module): block for stack in denoiser.stacks for block in stack.blocks}
    yield _top(denoiser)
    seen: set[type] = {type(denoiser.inner)}
    for module in denoiser.inner.modules():
        cls = type(module)
        if cls in seen or _is_torchs(cls):
            continue
        seen.add(cls)
        block = blocks.get(id(module))
        if block is not None:
            kind, why = _block(block)
        elif callable(getattr(module, "processor", None)):
            continue  # with its processor, below
        else:
            kind, why = _module(module)
        yield _class_piece("transformer", cls, kind, why)
    yield from _attention(denoiser)


def _top(denoiser: DenoiserSite) -> Piece:
    cls = type(denoiser.inner)
    if denoiser.stacks:
        return _class_piece("transformer", cls, COVERED, "called as a module: the denoiser seam")
    why = "no stack of blocks below it, so there is no trunk to skip, watch or shard; attention and guidance can be hooked"
    return _class_piece("transformer", cls, ATTENTION, why)


def _block(block: Any) -> tuple[str, str]:
    stack = block.stack
    if stack.returns is None:
        return ATTENTION, f"in {stack.path}, whose streams are not known: its blocks always run"
    wide = sorted(
        name for name, m in block.module.named_modules() if isinstance(m, MIXES_TOKENS) and max(_kernel(m)) > 1
    )
    if wide:
        return ATTENTION, f"{wide[0]} is a convolution over neighbouring tokens: its tokens cannot be sharded"
    return COVERED, f"a block of {stack.path}, streams {', '.join(stack.returns)}: the block seam"


def _kernel(module: Any) -> tuple[int, ...]:
    size = module.kernel_size
    return size if isinstance(size, tuple) else (size,)


def _module(module: nn.Module) -> tuple[str, str]:
    names = set(inspect.unwrap(type(module).forward).__code__.co_names)
    own = sorted(names & OWN_ATTENTION)
    if own:
        return ATTENTION, f"its forward calls {own[0]} itself, and has no processor that could be hooked"
    return COVERED, "runs inside the denoiser seam"


def _attention(denoiser: DenoiserSite) -> Iterator[Piece]:
    for site in denoiser.attention:
        if not callable(getattr(site.module, "processor", None)):
            continue  # a module that computes attention by itself, above
        processor = type(site.module.processor)
        yield _class_piece("attention", type(site.module), COVERED, "holds a processor")
        if site.reachable:
            why = "calls dispatch_attention_fn or F.scaled_dot_product_attention: the attention seam"
            yield _class_piece("attention", processor, COVERED, why)
        else:
            why = f"calls neither dispatch_attention_fn nor F.scaled_dot_product_attention ({site.path})"
            yield _class_piece("attention", processor, ATTENTION, why)


# -- scheduler ---------------------------------------------------------------------------------------------------------


def scheduler_pieces(source: PipelineSource, classes: dict[str, type]) -> Iterator[Piece]:
    """The scheduler's methods that a call runs: what the pipeline calls, and what those call."""
    cls = classes.get("scheduler")
    if cls is None or not hasattr(cls, "step"):
        return
    methods = vars_of(cls)
    asked = {
        (place, statement.call.split(".")[2])
        for place, _, statement in source.component_calls({"scheduler"})
        if statement.call.count(".") == 2
    } | {("before", "set_timesteps")}  # mostly through a helper of diffusers
    in_loop = {method for place, method in asked if place == "loop"} - {"step", "set_timesteps"}
    steps = any(method == "step" for _, method in asked)
    seen: set[str] = set()
    for root in sorted({method for _, method in asked} & set(methods), key=lambda name: (name in in_loop, name)):
        for name in _closure(methods, root):
            if name in seen:
                continue
            seen.add(name)
            kind, why = (
                COVERED,
                f"reached from {root}, "
                + ("the clock seam" if root in ("step", "set_timesteps") else "before or after the loop"),
            )
            if root in in_loop:
                kind, why = SHAPE, f"the pipeline calls {root} in its loop, and the clock sees only step"
            elif not steps:
                kind, why = SHAPE, "the pipeline's call never calls scheduler.step"
            yield Piece(
                "scheduler", f"{cls.__name__}.{name}", kind, count(methods[name]), why, place_in_file(methods[name])
            )


def _closure(methods: dict[str, Callable[..., Any]], root: str) -> list[str]:
    found, todo = [], [root]
    while todo:
        name = todo.pop()
        if name in found or name not in methods:
            continue
        found.append(name)
        todo += [
            call[5:] for call, _ in calls(tree_of(methods[name])) if call.startswith("self.") and call.count(".") == 1
        ]
    return found


# -- VAE, text encoders and the rest -----------------------------------------------------------------------------------


def side_pieces(pipe: Any, source: PipelineSource, classes: dict[str, type], modules: set[str]) -> Iterator[Piece]:
    """Components that are no denoiser: by where a call runs them."""
    places: dict[str, set[str]] = {}
    for place, component, _ in source.component_calls(modules):
        places.setdefault(component, set()).add(place)
    denoisers = {name.removeprefix("self.") for name in source.denoisers}
    for name in sorted(modules - denoisers):
        cls = classes.get(name) or type(getattr(pipe, name, None))
        if cls is type(None) or (name not in places and not name.startswith(ENCODERS)):
            continue
        if name == "vae":
            yield from _vae(getattr(pipe, name, None), cls)
        elif name.startswith(ENCODERS):
            how = (
                "runs in the prepare stage" if name in places else "is called under another name, in the prepare stage"
            )
            yield _class_piece("prompt encoding", cls, COVERED, f"{name} {how}")
        elif places[name] <= {"before"}:
            yield _class_piece("other modules", cls, COVERED, f"{name} runs in the prepare stage")
        else:
            when = "in every step" if "loop" in places[name] else "after the last step"
            yield _class_piece("other modules", cls, STAGE, f"{name} runs {when}, in no seam or stage")


def _vae(module: Any, cls: type) -> Iterator[Piece]:
    yield _class_piece("vae", cls, COVERED, "vae.encode in the prepare stage, vae.decode in the decode stage")
    inner = {type(m) for m in module.modules()} if isinstance(module, nn.Module) else set()
    for part in sorted(inner - {cls}, key=lambda c: c.__name__):
        if not _is_torchs(part):
            yield _class_piece("vae", part, COVERED, "runs inside the VAE")


def _class_piece(part: str, cls: type, kind: str, why: str) -> Piece:
    return Piece(part, cls.__name__, kind, count(cls), why, place_in_file(cls))


def _is_torchs(cls: type) -> bool:
    return cls.__module__.startswith("torch.")
