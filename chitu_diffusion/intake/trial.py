"""One small call of a pipeline, cut short before its first scheduler step: what the denoiser and the blocks are given.

It is made twice, the second time with another sample: the rows of a block's input that moved are image tokens, the others
text. So roles and token order are seen, and not guessed from names or lengths.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

import chitu_hooks
from chitu_hooks import AttentionContext, BlockInputs, Call, Feature, HookMap, Order, Stack, StepCall, Streams
from chitu_hooks.call import map_tensors
from chitu_hooks.sites import BlockSite, StackSite

from .aligned import with_aligned
from .draft import Draft

Run = Callable[[], Any]
"""One small call of the pipeline."""


class Enough(BaseException):  # past every `except Exception` of the pipeline and of the call
    """Everything has been seen; the call is not finished."""


@dataclass
class Seen:
    """What one cut-short call showed."""

    entries: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    """Stack path -> argument of the first block -> tensor, of the first denoiser call, in the order of the calls."""
    given: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Stack path -> everything that its first block was given, as it was handed on."""
    exits: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    """Stack path -> tensors that the last block called returned."""
    queries: dict[str, torch.Tensor] = field(default_factory=dict)
    """Stack path -> queries of its first attention call, (B, S, H, D)."""
    streams: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Stack path -> arguments that carry streams, in the order in which blocks return them."""
    calls: int = 0
    """Denoiser calls of the first step."""
    batch: int = 0
    """Rows of the sample that the first denoiser call got."""
    step_batch: int = 0
    """Rows of the sample that the scheduler got; 0 if it was not called."""


class Look(Feature):
    """Watches the first step, changes nothing but the sample when it is told to, and ends the call.

    Args:
        perturb: give the denoiser another sample than the pipeline's.
    """

    name = "look"
    exactness = "exact"
    order = Order.CLOCK

    def __init__(self, seen: Seen, perturb: bool) -> None:
        self.seen = seen
        self.perturb = perturb

    def denoiser_in(self, call: Call) -> None:
        self.seen.calls += 1
        name = next(iter(call.denoiser.arguments))
        sample = call.argument(name)
        if self.seen.calls == 1:
            self.seen.batch = _rows(sample)
        if self.perturb:
            generator = torch.Generator("cpu").manual_seed(1)
            moved = map_tensors(
                sample, lambda t: t + torch.randn(t.shape, generator=generator).to(t) if t.is_floating_point() else t
            )
            if name in call.kwargs:
                call.kwargs = {**call.kwargs, name: moved}
            else:
                call.args = (moved, *call.args[1:])

    def block_in(self, call: Call, block: BlockSite, inputs: BlockInputs) -> None:
        return None

    def block_out(self, call: Call, block: BlockSite, outputs: Streams) -> None:
        if self.seen.calls == 1:
            self.seen.exits[block.stack.path] = [t.clone() for t in outputs.values() if isinstance(t, torch.Tensor)]

    def attention(self, q_BSHD: Any, k_BTHD: Any, v_BTHD: Any, ctx: AttentionContext) -> None:
        stack = ctx.site.stack if ctx.site is not None else None
        if stack is not None and self.seen.calls == 1 and stack.path not in self.seen.queries:
            self.seen.queries[stack.path] = q_BSHD.detach().clone()

    def step_in(self, step: StepCall) -> None:
        self.seen.step_batch = step.sample.shape[0]
        raise Enough


class _LookWithoutTrunk(Look):
    block_in, block_out = Feature.block_in, Feature.block_out  # type: ignore[assignment]


def see(pipe: Any, hook_map: HookMap, run: Run, *, perturb: bool = False) -> Seen:
    """Make one call up to its first scheduler step.

    Args:
        pipe: the pipeline, with weights.
        hook_map: a map whose stacks may have no streams yet: they are inferred while the call runs.
        run: makes the call.
        perturb: give the denoiser another sample.
    """
    seen = Seen()
    look = Look if hook_map.stacks else _LookWithoutTrunk
    with chitu_hooks.patch(pipe, [look(seen, perturb)], hook_map=hook_map) as handle:
        stacks = handle.sites.denoisers[0].stacks
        with _entries(stacks, seen), contextlib.suppress(Enough):
            run()
        for stack in stacks:
            if stack.returns and stack.streams:
                seen.streams[stack.path] = tuple(stack.streams[role] for role in stack.returns)
    return seen


@contextlib.contextmanager
def _entries(stacks: list[StackSite], seen: Seen) -> Iterator[None]:
    """Keep what each stack's first block is given, by torch's own hooks, which know nothing of roles."""
    with contextlib.ExitStack() as hooks:
        for stack in stacks:
            block = stack.blocks[0]

            def keep(module: Any, args: Any, kwargs: Any, block: BlockSite = block) -> None:
                inputs = BlockInputs(block, args, kwargs)
                values = {name: inputs.get(name) for name in block.arguments}
                if block.stack.path not in seen.entries:
                    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
                    seen.entries[block.stack.path] = {name: value.detach().clone() for name, value in tensors.items()}
                    seen.given[block.stack.path] = values

            hooks.callback(block.module.register_forward_pre_hook(keep, with_kwargs=True).remove)
        yield


def _rows(value: Any) -> int:
    return value.shape[0] if isinstance(value, torch.Tensor) else len(value)


# -- from what was seen to a map ---------------------------------------------------------------------------------------


def complete(pipe: Any, draft: Draft, run: Run) -> Draft:
    """The draft with streams, roles, order, refiners and guidance as two cut-short calls showed them."""
    bare = tuple(Stack(stack.path, streams={}, returns=()) for stack in draft.hook_map.stacks or ())
    probe = dataclasses.replace(draft.hook_map, stacks=bare)
    one, other = see(pipe, probe, run), see(pipe, probe, run, perturb=True)
    questions: list[str] = []
    evidence = [line for line in draft.evidence if "left out" in line]
    stacks = _stacks(draft, one, other, questions, evidence)
    seen = _guidance(one)
    guidance = seen or draft.hook_map.guidance
    evidence.append(
        f"guidance {guidance}: "
        + (
            f"{one.calls} denoiser calls a step, {one.batch} rows for {one.step_batch}"
            if seen
            else "read from the loop"
        )
    )
    hook_map = dataclasses.replace(draft.hook_map, stacks=tuple(stacks), guidance=guidance)
    return Draft(hook_map, tuple(questions), tuple(evidence))


def _stacks(draft: Draft, one: Seen, other: Seen, questions: list[str], evidence: list[str]) -> list[Stack]:
    drafted = {stack.path: stack for stack in draft.hook_map.stacks or ()}
    run_order = [path for path in one.entries if path in drafted]
    known: dict[str, int] = {}
    """Role -> tokens, of what has been settled."""
    order: tuple[str, ...] = ()
    mixed = False
    """Whether a stack before has let image and text act on each other, so that everything moves with the sample."""
    stacks = []
    for path in run_order:
        arguments = one.streams.get(path) or _plain_streams(drafted[path], one, path)
        if not arguments:
            questions.append(
                f"{path}: no output of a block is an argument of the next; name its streams and returns, or leave them empty: its "
                "blocks then always run"
            )
            stacks.append(Stack(path, streams={}, returns=()))
            continue
        roles = {}
        for argument in arguments:
            role, found = (
                _mixed_role(path, argument, one, known, len(arguments)) if mixed else _role(path, argument, one, other)
            )
            roles[argument] = role
            order = order or found
        if len(set(roles.values())) < len(roles):
            questions.append(f"{path}: {' and '.join(roles)} have the same role; its streams are left to inference")
            stacks.append(Stack(path, streams={}, returns=()))
            continue
        order = order or _query_order(one.queries.get(path), other.queries.get(path))
        mixed = mixed or len(roles) > 1 or "joint" in roles.values()
        for argument, role in roles.items():
            known.setdefault(role, one.entries[path][argument].shape[1])
        evidence.append(
            f"{path}: {', '.join(f'{a} is {r}' for a, r in roles.items())}: seen in a call with another sample"
        )
        stacks.append(Stack(path, {r: a for a, r in roles.items()}, tuple(roles.values())))
    if mixed and not order:
        questions.append(
            "whether text or image tokens come first in joint attention was not seen; order=('text', 'image') is the default"
        )
    missing = [path for path in drafted if path not in run_order]
    questions += [f"{path}: no block of it was called; leave it out if it never is" for path in missing]
    finished = [_finished(stack, stacks, order) for stack in stacks]
    return [with_aligned(stack, one.given.get(stack.path, {}), questions) for stack in finished]


def _plain_streams(stack: Stack, seen: Seen, path: str) -> tuple[str, ...]:
    """What the source says that the blocks return, where a single block hides it; only arguments that were given."""
    names = tuple(stack.streams[role] for role in stack.returns)
    return names if all(name in seen.entries[path] for name in names) else ()


def _role(path: str, argument: str, one: Seen, other: Seen) -> tuple[str, tuple[str, ...]]:
    """The role of a stream that nothing has mixed yet, and the token order if this stream shows it."""
    moved = _moved(one.entries[path][argument], other.entries[path][argument])
    if moved is None or moved.all():
        return "image", ()
    if not moved.any():
        return "text", ()
    return "joint", ("image", "text") if moved[0] else ("text", "image")


def _mixed_role(
    path: str, argument: str, one: Seen, known: dict[str, int], streams: int
) -> tuple[str, tuple[str, ...]]:
    """The role of a stream after image and text have been mixed: by its length, and by name where lengths coincide."""
    entry = one.entries[path][argument]
    image, text = known.get("image", -1), known.get("text", -1)
    if streams == 1:
        if entry.dim() == 3 and ("joint" in known or entry.shape[1] == image + text):
            return "joint", _joined_order(entry, one, known)
        return "image", ()
    if image != text:
        return "text" if entry.shape[1] == text else "image", ()
    return "text" if argument.startswith("encoder") else "image", ()


def _moved(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor | None:
    """Which of the tokens of a (B, S, C) stream another sample moved; None for what is no sequence of tokens."""
    if before.dim() != 3 or before.shape != after.shape:
        return None
    return (before != after).any(-1).any(0)


def _joined_order(entry: torch.Tensor, seen: Seen, known: dict[str, int]) -> tuple[str, ...]:
    """The order of a joint stream, from where the outputs of the stack before stand in it."""
    image, text = known.get("image"), known.get("text")
    for tensor in (tensor for tensors in seen.exits.values() for tensor in tensors):
        if image == text or tensor.dim() != 3 or tensor.shape[1] != text or tensor.shape[2] != entry.shape[2]:
            continue
        if torch.equal(entry[:, :text], tensor):
            return ("text", "image")
        if torch.equal(entry[:, -text:], tensor):
            return ("image", "text")
    return ()


def _query_order(before: torch.Tensor | None, after: torch.Tensor | None) -> tuple[str, ...]:
    """Token order in the joint attention of the first block: queries of text tokens do not move with the sample."""
    if before is None or after is None or before.shape != after.shape:
        return ()
    moved = (before != after).flatten(2).any(-1).any(0)
    if moved.all() or not moved.any():
        return ()
    return ("image", "text") if moved[0] else ("text", "image")


def _finished(stack: Stack, stacks: list[Stack], order: tuple[str, ...]) -> Stack:
    """`stack` with its token order, and marked as a refiner if it runs before a joint stack on one kind of tokens."""
    joint_later = any("joint" in other.streams for other in stacks[stacks.index(stack) + 1 :])
    single = len(stack.streams) == 1 and "joint" not in stack.streams
    mixed = len(stack.streams) > 1 or "joint" in stack.streams
    return dataclasses.replace(
        stack,
        order=order if mixed and order else ("text", "image"),
        refiner=single and joint_later and bool(stack.streams),
    )


def _guidance(seen: Seen) -> Any:
    """What the call showed of guidance; None if it ran one branch, which may be all there is or not switched on."""
    if seen.calls > 1:
        return "sequential"
    return "batched" if seen.step_batch and seen.batch == 2 * seen.step_batch else None
