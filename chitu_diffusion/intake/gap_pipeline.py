"""Gap rules for the pipeline's own code: its call, the statements of its loop, and the functions that it reaches."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from .gap import COVERED, GLUE, SHAPE, STAGE, Piece
from .source import PipelineSource, Reached, Statement, calls, count, place_in_file, tree_of, vars_of

RESHAPES = frozenset(
    ("permute", "reshape", "view", "unflatten", "flatten", "transpose", "movedim", "swapaxes", "repeat_interleave")
)
"""Tensor methods after which a latent is no longer laid out as the scheduler has it."""
LATENTS = ("latent", "noise_pred", "model_output", "velocity", "sample", "pred")
ENCODERS = ("text_encoder", "tokenizer")
MOVES = frozenset(
    (
        "to",
        "config",
        "dtype",
        "device",
        "enable_tiling",
        "disable_tiling",
        "eval",
        "parameters",
        "modules",
        "state_dict",
    )
)
"""What is asked of a module without running it."""
FILTERS = ("safety_checker", "feature_extractor", "watermark")


def pipeline_pieces(source: PipelineSource, modules: set[str]) -> Iterator[Piece]:
    """The pieces of the pipeline class and of the helpers in its file."""
    flagged = _flagged(source, modules)
    inside = sum(statement.lines for statement, _, _ in flagged if statement.owner is source.call)
    yield _call_piece(source, count(source.call) - inside)
    for statement, kind, why in flagged:
        if statement.owner is source.call:
            where = place_in_file(statement.owner, statement.node.lineno)
            yield Piece("pipeline", statement.call, kind, statement.lines, why, where)
    helpers = {id(s.owner): (kind, why) for s, kind, why in flagged if s.owner is not source.call}
    for reached in source.reached.values():
        kind, why = helpers.get(id(reached.function)) or _helper(source, reached)
        yield Piece(
            _part(reached.function), reached.name, kind, count(reached.function), why, place_in_file(reached.function)
        )
    yield from _not_reached(source)


def _call_piece(source: PipelineSource, lines: int) -> Piece:
    where = place_in_file(source.call)
    names = {name for loop in source.loops for name, _ in calls(loop)} | {
        name for name in source.steppers for name, _ in calls(tree_of(vars_of(source.cls)[name]))
    }
    called = [name for name in (*source.denoisers, *source.aliases) if name in names]
    if called and "self.scheduler.step" in names:
        why = f"its loop calls {' and '.join(called)} and self.scheduler.step: the clock and denoiser seams"
        return Piece("pipeline", f"{source.cls.__name__}.__call__", COVERED, lines, why, where)
    missing = "self.scheduler.step" if called else " or ".join(source.denoisers)
    why = f"no loop was found in it that calls {missing}, so its steps cannot be told apart"
    return Piece("pipeline", f"{source.cls.__name__}.__call__", SHAPE, lines, why, where)


def _flagged(source: PipelineSource, modules: set[str]) -> list[tuple[Statement, str, str]]:
    """Statements that no seam or stage sees, each once, with class and evidence."""
    found: dict[tuple[int, int], tuple[Statement, str, str]] = {}

    def flag(statement: Statement, kind: str, why: str) -> None:
        found.setdefault((id(statement.owner), statement.node.lineno), (statement, kind, why))

    for statement in source.loop_statements():
        why = _loop_shape(statement.call)
        if why:
            flag(statement, SHAPE, why)
    for place, component, statement in source.component_calls(modules):
        why = _unseen_run(source, place, component, statement)
        if why:
            flag(statement, STAGE, why)
    return list(found.values())


def _loop_shape(call: str) -> str:
    """Why a call in the loop needs scheduler or latent-shape handling, or nothing."""
    owner, _, method = call.rpartition(".")
    if owner == "self.scheduler" and method != "step":
        return f"scheduler.{method} is called in the loop, and the clock sees only step"
    if method == "step" and owner.endswith("scheduler") and owner != "self.scheduler":
        return f"{owner} is a second scheduler, which the clock does not watch"
    name = owner.rpartition(".")[2]
    if method in RESHAPES and any(word in name for word in LATENTS):
        return f"{name} is laid out anew between the denoiser and the scheduler"
    return ""


def _unseen_run(source: PipelineSource, place: str, component: str, statement: Statement) -> str:
    """Why a call of a module needs a stage wrapper, or nothing."""
    method = statement.call.split(".", 2)[2] if statement.call.count(".") > 1 else ""
    chained = "." in method and f"self.{component}" not in source.denoisers  # a tensor of the module, mostly
    if chained or MOVES.intersection(method.split(".")) or component.startswith((*FILTERS, "tokenizer")):
        return ""
    if place == "before":
        return f"{component}.{method} is a loop of its own before the first step" if method == "generate" else ""
    denoiser = f"self.{component}" in source.denoisers
    if place == "loop":
        if denoiser and not method:
            return ""
        if denoiser:
            return f"{statement.call} runs a part of the denoiser past its seam"
        return f"{component} runs in every step, inside no seam: a skipped step runs it all the same"
    if component == "vae" and method == "decode":
        return (
            "the VAE is called in a loop, and the decode stage sees its first call only" if _in_loop(statement) else ""
        )
    return f"{component} runs after the last step, in no stage of its own"


def _in_loop(statement: Statement) -> bool:
    line = statement.node.lineno
    kinds = ast.For | ast.While | ast.ListComp | ast.GeneratorExp
    loops = [node for node in ast.walk(tree_of(statement.owner)) if isinstance(node, kinds)]
    return any(loop.lineno <= line <= (loop.end_lineno or line) for loop in loops)


def _helper(source: PipelineSource, reached: Reached) -> tuple[str, str]:
    """Class and evidence of a function that the call reaches."""
    names = [name for name, _ in calls(tree_of(reached.function))]
    short = reached.name.rpartition(".")[2]
    if "loop" in reached.places:
        if short in source.steppers:
            return COVERED, "calls the denoiser or the scheduler in the loop"
        if any(_reshapes(name) for name in names):
            return SHAPE, "lays tensors out anew in every step, between the denoiser and the scheduler"
        return COVERED, "arithmetic of a step, on what the denoiser returned"
    if not _returns(reached.function) and not any(name.startswith("torch.") for name in names):
        return GLUE, "returns nothing and computes no tensor: validation or bookkeeping"
    stages = {"before": "prepare stage: before the first step", "after": "decode or output stage: after the last step"}
    return COVERED, " and ".join(stages[place] for place in sorted(reached.places))


def _reshapes(name: str) -> bool:
    return name.rpartition(".")[2] in RESHAPES


def _returns(function: Callable[..., object]) -> bool:
    return any(
        isinstance(node, ast.Return | ast.Yield) and node.value is not None for node in ast.walk(tree_of(function))
    )


def _part(function: Callable[..., object]) -> str:
    """*prompt encoding* for what calls a text encoder or tokenizer, or encodes a prompt through others."""
    names = {name for name, _ in calls(tree_of(function))}
    encodes = any(name.startswith(tuple(f"self.{word}" for word in ENCODERS)) for name in names)
    return "prompt encoding" if encodes or "prompt" in function.__name__ else "pipeline"


def _not_reached(source: PipelineSource) -> Iterator[Piece]:
    """One piece for what is written in the class and never run by a call."""
    known = {id(reached.function) for reached in source.reached.values()} | {id(source.call)}
    lines = sum(count(function) for function in vars_of(source.cls).values() if id(function) not in known)
    lines += sum(
        count(value.fget)
        for value in vars(source.cls).values()
        if isinstance(value, property) and value.fget is not None
    )
    if lines:
        why = "not called by pipe(...): construction, properties, methods for other uses"
        yield Piece("pipeline", f"{source.cls.__name__}: the rest", GLUE, lines, why)
