"""The block seam: entry and exit of the trunk, skipping it, and what features do before and after a block.

Each stack's exit returns this call's entry plus the stored residual when the trunk is skipped. What happens between the
stacks and between blocks (ControlNet samples are added there, by some models in place) runs as always on a clone that is
dropped. First and last are the first and last block *called*, which skip-layer guidance changes from branch to branch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from . import infer
from .call import BlockInputs, Call, StackRun
from .errors import GenerationError, HookMapError, RefusedError
from .state import ACTIVE, Streams

if TYPE_CHECKING:
    from .engine import Engine
    from .sites import BlockSite, ExitSite, StackSite


class BlockSeam:
    """What happens at every block of one engine.

    Args:
        engine: whose features run here.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.plan()

    def plan(self) -> None:
        """Work out, once, which features of the engine run here."""
        engine = self.engine
        self.trunk_in = engine.having("trunk_in")
        self.trunk_out = engine.having("trunk_out")
        self.block_in = engine.having("block_in")
        self.block_out = engine.having("block_out")
        self.keeps_residuals = any(feature.skips_trunk for feature in engine.features)
        self.observes = bool(self.trunk_in or self.trunk_out or self.block_in or self.block_out)

    def enter(self, block: BlockSite, rest: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One block call. `rest` is the chain behind the shim."""
        call = ACTIVE.call
        if call is None or call.engine is not self.engine:
            return rest(*args, **kwargs)
        stack = block.stack
        call.block_calls += 1
        run = call.runs.get(stack.number)
        if run is None:
            run = call.runs[stack.number] = StackRun(call.block_calls)
        run.last_index = block.index
        run.last_at = call.block_calls
        if stack.returns is None:
            if stack.tries >= infer.GIVE_UP_AFTER:
                return rest(*args, **kwargs)
            return self._unresolved(block, run, call, rest, args, kwargs)
        last = call.branch.last_called.get(stack.number)
        if (
            run.entry is not None
            and not call.skipping
            and not self.observes
            and last is not None
            and block.index != last
        ):
            return rest(*args, **kwargs)
        return self._resolved(block, run, call, last, rest, BlockInputs(block, args, kwargs))

    def leave_trunk(
        self, site: ExitSite, rest: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The call of the module that takes the trunk's output, where the map names one."""
        call = ACTIVE.call
        if call is None or call.engine is not self.engine or not call.trunk_entered or call.trunk_left:
            return rest(*args, **kwargs)
        call.trunk_left = True
        value = args[0] if args else kwargs[site.argument]
        outputs = self._leave_trunk(call, {site.role: value})
        if outputs is None:
            return rest(*args, **kwargs)
        if args:
            return rest(outputs[site.role], *args[1:], **kwargs)
        return rest(**{**kwargs, site.argument: outputs[site.role]})

    def leave(self, call: Call) -> None:
        """The denoiser call is over: learn which blocks ran, drop residuals that were not renewed.

        Raises:
            GenerationError: a skipped stack was left half way, so that its residual was never added.
        """
        branch = call.branch
        if call.skipping:
            for number, run in call.runs.items():
                if number in (call.residuals or {}) and not run.exited:
                    path = call.denoiser.stacks[number].path
                    raise GenerationError(
                        f"{call.denoiser.name}.{path}: {branch.name} skipped the trunk, but the model stopped calling blocks at "
                        f"{run.last_index} and not at {branch.last_called.get(number)} as before"
                    )
            branch.skipped += 1
            return
        if call.replaced:
            branch.replaced += 1
            return
        branch.computed += 1
        branch.signature = call.signature
        for number in call.runs:
            call.denoiser.stacks[number].tries += call.denoiser.stacks[number].returns is None
        called = {number: run.last_index for number, run in call.runs.items()}
        if self.keeps_residuals:
            refuse_turns(call)
            for number in list(branch.residuals):
                known = branch.last_called.get(number)
                moved = known is not None and called.get(number) != known
                if moved or number not in called or not call.runs[number].exited:
                    del branch.residuals[number]
            stacks = call.denoiser.stacks
            branch.skippable = bool(branch.residuals) and all(
                number in branch.residuals or stacks[number].returns is None for number in called
            )
        branch.last_called = called

    # -- one block -------------------------------------------------------------------------------------------------

    def _resolved(
        self,
        block: BlockSite,
        run: StackRun,
        call: Call,
        last: int | None,
        rest: Callable[..., Any],
        inputs: BlockInputs,
    ) -> Any:
        stack = block.stack
        first = run.entry is None
        if first:
            self._enter_stack(stack, run, call, inputs)
        if call.skipping and stack.number in (call.residuals or {}):
            return self._pass(block, run, call, first, inputs)
        outputs: Any = None
        for feature in self.block_in:
            outputs = feature.block_in(call, block, inputs)
            if outputs is not None:
                break
        result = rest(*inputs.args, **inputs.kwargs) if outputs is None else pack(outputs, stack)
        exits = block.index == (stack.last if last is None else last)
        if not (self.block_out or exits or (last is None and self.keeps_residuals)):
            return result
        return self._after(block, run, call, last, exits, result)

    def _after(self, block: BlockSite, run: StackRun, call: Call, last: int | None, exits: bool, result: Any) -> Any:
        """Features after a block; the residual at the last one called, or at every one while that is not known yet."""
        stack = block.stack
        outputs = unpack(result, stack)
        changed = False
        for feature in reversed(self.block_out):
            replaced = feature.block_out(call, block, outputs)
            if replaced is not None:
                outputs, changed = replaced, True
        if self.keeps_residuals and (exits or last is None):
            call.branch.residuals[stack.number] = residual(run.entry or {}, outputs)
            run.exited = True
        if exits and self._ends_trunk(stack, call):
            replaced = self._leave_trunk(call, outputs)
            if replaced is not None:
                outputs, changed = replaced, True
        return pack(outputs, stack) if changed else result

    def _pass(self, block: BlockSite, run: StackRun, call: Call, first: bool, inputs: BlockInputs) -> Any:
        """A block of a skipped trunk: pass on, or at the exit return this call's entry plus the residual."""
        stack = block.stack
        entry = run.entry or {}
        if block.index != call.branch.last_called[stack.number]:
            streams = inputs.streams()
            # The model may add to what it is handed, in place: it gets a clone, the entry stays whole.
            return pack({r: _clone(t) for r, t in streams.items()} if first else streams, stack)
        run.exited = True
        residuals = (call.residuals or {})[stack.number]
        outputs = {
            role: None if residuals.get(role) is None else entry[role] + residuals[role] for role in stack.returns or ()
        }
        if self._ends_trunk(stack, call):
            outputs = self._leave_trunk(call, outputs) or outputs
        return pack(outputs, stack)

    def _enter_stack(self, stack: StackSite, run: StackRun, call: Call, inputs: BlockInputs) -> None:
        if self.trunk_in and not call.trunk_entered and not stack.refiner:
            streams = inputs.streams()
            for feature in self.trunk_in:
                streams = feature.trunk_in(call, streams) or streams
            inputs.replace(streams)
        call.trunk_entered = call.trunk_entered or not stack.refiner
        entry = inputs.streams()
        # A block may work in place on its input; a residual needs the entry as it was.
        keep = self.keeps_residuals and not call.skipping
        run.entry = {role: _clone(tensor) for role, tensor in entry.items()} if keep else entry

    def _ends_trunk(self, stack: StackSite, call: Call) -> bool:
        # A call during which the streams were still being learned has not entered the trunk, and leaves it neither.
        if not self.trunk_out or not call.trunk_entered or call.denoiser.exit is not None:
            return False
        return stack is trunk_end(stack, call)

    def _leave_trunk(self, call: Call, outputs: Streams) -> Streams | None:
        changed = None
        for feature in reversed(self.trunk_out):
            replaced = feature.trunk_out(call, outputs)
            if replaced is not None:
                outputs = changed = replaced
        return changed

    def _unresolved(
        self,
        block: BlockSite,
        run: StackRun,
        call: Call,
        rest: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """A block of a stack whose streams are not known yet: run it and learn them from what the next block gets."""
        inputs = BlockInputs(block, args, kwargs)
        if infer.resolve(block, run, inputs):
            return self._resolved(block, run, call, None, rest, inputs)
        kept = infer.snapshot(inputs) if run.probe is None else None
        result = rest(*args, **kwargs)
        infer.record(block, run, inputs, result, kept)
        if stack_is_single(block) and infer.resolve_single(block, run, result) and self.keeps_residuals:
            call.branch.residuals[block.stack.number] = residual(run.entry or {}, unpack(result, block.stack))
            run.exited = True
        return result


def refuse_turns(call: Call) -> None:
    """Raise if two stacks take turns, such as spatial and temporal blocks: what one adds goes into what the other adds.

    A stack that runs between two blocks of another is none of those: the outer one's residual holds what it adds.
    """
    runs = [(number, run) for number, run in call.runs.items() if run.exited]
    for number, run in runs:
        for other, later in runs:
            if run.first_at < later.first_at < run.last_at < later.last_at:
                stacks = call.denoiser.stacks
                raise RefusedError(
                    f"{call.denoiser.name}: the blocks of {stacks[number].path!r} and {stacks[other].path!r} take turns, so "
                    "neither stack can be skipped as a whole; run this pipeline without a cache"
                )


def trunk_end(stack: StackSite, call: Call) -> StackSite:
    """The stack whose exit ends the trunk: the last one that this branch called, or the last of the map."""
    stacks = stack.denoiser.stacks
    known = [number for number in call.branch.last_called if not stacks[number].refiner and stacks[number].returns]
    return stacks[known[-1]] if known else next((s for s in reversed(stacks) if s.returns), stack)


def stack_is_single(block: BlockSite) -> bool:
    return len(block.stack.blocks) == 1


def unpack(result: Any, stack: StackSite) -> Streams:
    """Role -> tensor of what a block returned.

    Raises:
        HookMapError: that has another form than the map says, so that what `pack` makes could not stand for it.
    """
    roles = stack.returns or ()
    if isinstance(result, torch.Tensor) and len(roles) == 1:
        return {roles[0]: result}
    if isinstance(result, (tuple, list)) and len(result) == len(roles) > 1:
        return dict(zip(roles, result))
    form = f"{len(result)} values" if isinstance(result, (tuple, list)) else f"one {type(result).__name__}"
    raise HookMapError(
        f"{stack.denoiser.name}.{stack.path}: a block returned {form}, and the hook map says returns={roles}; correct the map"
    )


def pack(outputs: Streams, stack: StackSite) -> Any:
    """The streams in the form in which the stack's blocks return them."""
    roles = stack.returns or ()
    return outputs.get(roles[0]) if len(roles) == 1 else tuple(outputs.get(role) for role in roles)


def residual(entry: Streams, outputs: Streams) -> dict[str, torch.Tensor | None]:
    """Role -> exit minus entry; None for a stream that the last block does not return."""
    return {
        role: None if out is None or entry.get(role) is None else out - entry[role] for role, out in outputs.items()
    }


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
