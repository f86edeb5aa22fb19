"""The block seam: entry and exit of the trunk, skipping it, and what features do before and after a block.

Each stack's exit returns this call's entry plus the stored residual when the trunk is skipped. What happens between the
stacks and between blocks (ControlNet samples are added there, by some models in place) runs as always on a clone that is
dropped. First and last are the first and last block *called*, which skip-layer guidance changes from branch to branch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from . import infer
from .call import BlockInputs, Call, StackRun
from .errors import GenerationError, PatchError, RefusedError
from .spans import Spans, find_spans
from .state import ACTIVE, Streams
from .streams import cloned, pack, residual, unpack

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
        """Work out, once, which features of the engine run here.

        Raises:
            PatchError: two features want to skip different parts of the trunk.
        """
        engine = self.engine
        self.trunk_in = engine.having("trunk_in")
        self.front_out = engine.having("front_out")
        self.trunk_out = engine.having("trunk_out")
        self.block_in = engine.having("block_in")
        self.block_out = engine.having("block_out")
        skipping = [feature for feature in engine.features if feature.skips_trunk]
        self.keeps_residuals = bool(skipping)
        self.observes = bool(self.block_in or self.block_out)
        wishes = {(feature.front, feature.back, feature.reuses): feature for feature in skipping}
        if len(wishes) > 1:
            names = " and ".join(f"{feature.name} (front, back, reuses = {wish})" for wish, feature in wishes.items())
            raise PatchError(f"{names} skip the trunk in different ways; use one of them")
        self.skipper = skipping[0] if skipping else None
        self.reuses_output = bool(skipping) and skipping[0].reuses == "output"
        self._spans: dict[tuple[int, ...], Spans] = {}

    def spans_of(self, call: Call) -> Spans:
        """What a skip would leave out of `call`, by the order in which its branch runs the stacks or else the map's.

        An inferred map does not know that order, nor which of its lists are stacks: then a branch's first call has no
        front and leaves no residual, also in later generations, so that all are alike.
        """
        if call.branch.spans is not None:
            return call.branch.spans
        skipper = self.skipper
        if skipper and (skipper.front or skipper.back) and self.engine.hook_map.learns:
            return Spans()
        return self._spans_in_order(call.denoiser.stacks)

    def _spans_in_order(self, stacks: Sequence[StackSite]) -> Spans:
        order = tuple(id(stack) for stack in stacks)
        if order not in self._spans:
            ends = (self.skipper.front, self.skipper.back) if self.skipper else (0, 0)  # `bind` may have set them
            self._spans[order] = find_spans(stacks, *ends)
        return self._spans[order]

    def enter(self, block: BlockSite, rest: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One block call. `rest` is the chain behind the shim."""
        call = ACTIVE.call
        if call is None or call.engine is not self.engine:
            return rest(*args, **kwargs)
        stack = block.stack
        call.block_calls += 1
        run = call.runs.get(stack.number)
        begins = run is None
        if run is None:
            run = call.runs[stack.number] = StackRun(call.block_calls)
        run.last_index = block.index
        run.last_at = call.block_calls
        inside = call.spans.covers(stack.number, block.index)
        if inside:
            run.last_inside = block.index
        if stack.returns is None:
            if stack.tries >= infer.GIVE_UP_AFTER:
                return rest(*args, **kwargs)
            return self._unresolved(block, run, call, rest, args, kwargs)
        last = call.branch.last_called.get(stack.number)
        if (
            not begins
            and not call.skipping
            and not self.observes
            and last is not None
            and block.index != last
            and block.index != call.branch.last_inside.get(stack.number)
            and block is not call.spans.front_end
            and (run.entry is not None or not inside)
        ):
            return rest(*args, **kwargs)
        return self._resolved(block, run, call, begins, inside, rest, BlockInputs(block, args, kwargs))

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
                        f"{run.last_index} and not at {branch.last_inside.get(number)} as before"
                    )
            branch.skipped += 1
            return
        if call.replaced:
            branch.elsewhere += call.elsewhere
            branch.replaced += not call.elsewhere
            return
        branch.computed += 1
        branch.signature = call.signature
        for number in call.runs:
            call.denoiser.stacks[number].tries += call.denoiser.stacks[number].returns is None
        called = {number: run.last_index for number, run in call.runs.items()}
        if self.keeps_residuals:
            refuse_turns(call, parts=bool(self.skipper and (self.skipper.front or self.skipper.back)))
            self._settle_residuals(call, called)
        branch.last_called = called

    def _settle_residuals(self, call: Call, called: dict[int, int]) -> None:
        """Keep the residuals that were taken at the block that turned out to be the last one."""
        branch, stacks = call.branch, call.denoiser.stacks
        inside = {number: run.last_inside for number, run in call.runs.items() if run.last_inside >= 0}
        if branch.spans is None or list(called) != list(branch.last_called):
            branch.spans = self._spans_in_order([stacks[number] for number in called])
        same = branch.spans.ranges == {n: span for n, span in call.spans.ranges.items() if n in called}
        for number in list(branch.residuals):
            known = branch.last_inside.get(number)
            moved = known is not None and inside.get(number) != known
            if moved or not same or number not in inside or not call.runs[number].exited:
                del branch.residuals[number]
        branch.skippable = bool(branch.residuals) and all(
            number in branch.residuals or stacks[number].returns is None for number in branch.spans.ranges
        )
        branch.last_inside = inside

    # -- one block -------------------------------------------------------------------------------------------------

    def _resolved(
        self,
        block: BlockSite,
        run: StackRun,
        call: Call,
        begins: bool,
        inside: bool,
        rest: Callable[..., Any],
        inputs: BlockInputs,
    ) -> Any:
        stack = block.stack
        if begins:
            self._enter_stack(block, run, call, inputs)
        opens = inside and run.entry is None
        if opens:
            # A block may work in place on its input; a residual needs the entry as it was.
            run.entry = _streams(inputs, keep=self.keeps_residuals and not call.skipping)
        if inside and call.skipping and stack.number in (call.residuals or {}):
            return self._pass(block, run, call, opens, inputs)
        outputs: Any = None
        for feature in self.block_in:
            outputs = feature.block_in(call, block, inputs)
            if outputs is not None:
                break
        result = rest(*inputs.args, **inputs.kwargs) if outputs is None else pack(outputs, stack)
        last = call.branch.last_called.get(stack.number)
        exits = block.index == (stack.last if last is None else last)
        closes = inside and self.keeps_residuals and self._closes(block, call, last)
        if not (self.block_out or exits or closes or block is call.spans.front_end):
            return result
        return self._after(block, run, call, exits, closes, result)

    def _closes(self, block: BlockSite, call: Call, last: int | None) -> bool:
        """Whether the residual is taken after `block`: at the last of its span, or at every one while that is not known."""
        return last is None or block.index == call.branch.last_inside.get(block.stack.number)

    def _after(self, block: BlockSite, run: StackRun, call: Call, exits: bool, closes: bool, result: Any) -> Any:
        """Features after a block, and the residual at the last one."""
        stack = block.stack
        outputs = unpack(result, stack)
        changed = False
        for feature in reversed(self.block_out):
            replaced = feature.block_out(call, block, outputs)
            if replaced is not None:
                outputs, changed = replaced, True
        if closes and not call.skipping:
            call.branch.residuals[stack.number] = self._reusable(run, outputs)
            run.exited = True
        if block is call.spans.front_end:
            added = residual(run.front_entry or {}, outputs)
            for feature in self.front_out:
                feature.front_out(call, added)
        if exits and self._ends_trunk(stack, call):
            replaced = self._leave_trunk(call, outputs)
            if replaced is not None:
                outputs, changed = replaced, True
        return pack(outputs, stack) if changed else result

    def _reusable(self, run: StackRun, outputs: Streams) -> dict[str, torch.Tensor | None]:
        """What a later call can take from this one, see `Feature.reuses`."""
        if self.reuses_output:
            return cloned(outputs)
        return residual(run.entry or {}, outputs)

    def _pass(self, block: BlockSite, run: StackRun, call: Call, opens: bool, inputs: BlockInputs) -> Any:
        """A block of a skipped trunk: pass on, or at the exit return this call's entry plus the residual."""
        stack = block.stack
        entry = run.entry or {}
        if block.index != call.branch.last_inside[stack.number]:
            streams = inputs.streams()
            # The model may add to what it is handed, in place: it gets a clone, the entry stays whole.
            return pack(cloned(streams) if opens else streams, stack)
        run.exited = True
        residuals = (call.residuals or {})[stack.number]
        if self.reuses_output:
            outputs = cloned({role: residuals.get(role) for role in stack.returns or ()})
        else:
            outputs = {
                role: None if residuals.get(role) is None else entry[role] + residuals[role]
                for role in stack.returns or ()
            }
        if block.index == call.branch.last_called[stack.number] and self._ends_trunk(stack, call):
            outputs = self._leave_trunk(call, outputs) or outputs
        return pack(outputs, stack)

    def _enter_stack(self, block: BlockSite, run: StackRun, call: Call, inputs: BlockInputs) -> None:
        stack = block.stack
        if self.trunk_in and not call.trunk_entered and not stack.refiner:
            call.entry = inputs
            streams = inputs.streams()
            for feature in self.trunk_in:
                streams = feature.trunk_in(call, streams) or streams
            inputs.replace(streams)
        call.trunk_entered = call.trunk_entered or not stack.refiner
        front_end = call.spans.front_end
        if front_end is not None and front_end.stack is stack:
            run.front_entry = _streams(inputs, keep=True)

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
            inside = call.spans.covers(block.stack.number, block.index)
            return self._resolved(block, run, call, False, inside, rest, inputs)
        kept = infer.snapshot(inputs) if run.probe is None else None
        result = rest(*args, **kwargs)
        infer.record(block, run, inputs, result, kept)
        if (
            stack_is_single(block)
            and infer.resolve_single(block, run, result)
            and self.keeps_residuals
            and call.spans.covers(block.stack.number, 0)
        ):
            call.branch.residuals[block.stack.number] = self._reusable(run, unpack(result, block.stack))
            run.exited = True
        return result


def refuse_turns(call: Call, parts: bool) -> None:
    """Raise if two stacks take turns, such as spatial and temporal blocks: what one adds goes into what the other adds.

    A stack that runs between two blocks of another is none of those: the outer one's residual holds what it adds. Where only
    `parts` of the trunk are to be skipped, stacks of which no block was inside are in turns too: a number of blocks from the
    front or the back is counted stack after stack.
    """
    runs = [(number, run) for number, run in call.runs.items() if run.exited or (parts and _known(call, number))]
    for number, run in runs:
        for other, later in runs:
            if run.first_at < later.first_at < run.last_at < later.last_at:
                stacks = call.denoiser.stacks
                raise RefusedError(
                    f"{call.denoiser.name}: the blocks of {stacks[number].path!r} and {stacks[other].path!r} take turns, so "
                    "neither can be skipped; features that skip no trunk can be used here, such as caches of the output or of "
                    "attention"
                )


def _known(call: Call, number: int) -> bool:
    stack = call.denoiser.stacks[number]
    return stack.returns is not None and not stack.refiner


def _streams(inputs: BlockInputs, keep: bool) -> Streams:
    streams = inputs.streams()
    return cloned(streams) if keep else streams


def trunk_end(stack: StackSite, call: Call) -> StackSite:
    """The stack whose exit ends the trunk: the last one that this branch called, or the last of the map."""
    stacks = stack.denoiser.stacks
    known = [number for number in call.branch.last_called if not stacks[number].refiner and stacks[number].returns]
    return stacks[known[-1]] if known else next((s for s in reversed(stacks) if s.returns), stack)


def stack_is_single(block: BlockSite) -> bool:
    return len(block.stack.blocks) == 1
