"""Guidance parallelism: the branches of guidance on different ranks.

Batched guidance: each rank takes a part of the batch, and the outputs are gathered. Sequential guidance: each rank runs the
calls that are its own and hands out an empty tensor for the others; after the last call of a step the ranks exchange, and
the empty tensors are filled where they are. The pipeline combines the branches afterwards, as it always does.

How many calls a step has is not known in advance: the first step runs all of them everywhere, and a branch gets its owner
when the calls come as in the step before. It keeps that owner: what caches hold for it is up to date there and nowhere else.
While the calls of a step come as expected they are exchanged after the last of them; from the first surprise on, each at
once. `scheduler.step` settles what was left open.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from chitu_hooks import (
    Call,
    ChituWarning,
    Feature,
    Generation,
    GenerationError,
    HookMap,
    Order,
    Refusal,
    RefusedError,
    Sites,
    StepCall,
)
from chitu_hooks.branches import signature
from chitu_hooks.state import ACTIVE, Branch

from .collectives import all_gather, all_gather_dim, split
from .layout import start
from .mesh import Mesh

FILLED = -1
"""Owner of a call whose result all ranks have."""


class Pending:
    """One call of the step that is underway."""

    __slots__ = ("branch", "owner", "plannable", "sample")

    def __init__(self, branch: Branch, owner: int | None) -> None:
        self.branch = branch
        self.owner = owner
        """The rank that runs it; None: every rank."""
        self.sample: Any = None
        self.plannable = False
        """It returned one tensor, for which room can be made elsewhere."""


class GuidanceParallel(Feature):
    """Branches of guidance over the ranks of `mesh.cfg`."""

    name = "cfg parallel"
    exactness = "close"
    order = Order.GUIDANCE

    def __init__(self, mesh: Mesh) -> None:
        self.axis = mesh.cfg
        self.style = "unknown"
        self.split = self.left = 0

    def bind(self, sites: Sites, hook_map: HookMap) -> Refusal | None:
        self.style = hook_map.guidance
        if self.style == "embedded":
            return Refusal(
                f"guidance of {type(sites.pipe).__name__} is an input of the model, so a step has one branch and "
                f"cfg={self.axis.size} nothing to divide",
                f"use ulysses={self.axis.size} or gather={self.axis.size}",
            )
        return None

    def begin(self, generation: Generation) -> None:
        space = generation.memory(self)
        space.calls = []
        space.plans = {}
        space.certain = True
        space.proven = False
        space.sizes = None
        self.split = self.left = 0

    # -- one call --------------------------------------------------------------------------------------------------

    def denoiser_in(self, call: Call) -> Tensor | None:
        space = call.generation.memory(self)
        plan = space.plans.get(call.denoiser.name, ())
        place = len(space.calls)
        space.certain = space.certain and place < len(plan) and plan[place] is call.branch
        owner = self._owner(call, place, alone=not space.certain or len(plan) == 1)
        space.calls.append(Pending(call.branch, owner))
        if owner is not None:
            return None if owner == self.axis.index else self._leave_to_owner(call, space)
        if self.style == "batched" or (self.style == "unknown" and len(plan) == 1):
            space.sizes = self._slice(call)
        if getattr(call.branch.memory(self), "sizes", space.sizes) != space.sizes:
            call.branch.forget()  # what caches hold is of another part of the batch
        call.branch.memory(self).sizes = space.sizes
        return None

    def _owner(self, call: Call, place: int, alone: bool) -> int | None:
        """The rank that runs `call`, None for all of them."""
        if self.style == "batched":
            return None
        kept = call.branch.memory(self)
        owner, form = getattr(kept, "owner", None), getattr(kept, "form", None)
        if form is not None and form["input"] != shape_of(call.input):
            if owner is not None:  # what comes back has another shape too, and only the owner's caches know this branch
                call.branch.forget()
            return None
        if owner is None and form is not None and not alone:
            owner = kept.owner = place % self.axis.size
        return owner

    def _leave_to_owner(self, call: Call, space: Any) -> Tensor:
        self.left += 1
        call.elsewhere = True
        like = call.branch.memory(self).form["output"]
        # Not a number, the first time: a pipeline that reads it before it is filled is then found out at the step.
        return torch.empty(**like) if space.proven else torch.full(fill_value=torch.nan, **like)

    def _slice(self, call: Call) -> tuple[int, ...] | None:
        """Cut the batch; None if there are fewer samples than ranks, so that every rank runs all of them."""
        batch = batch_of(call)
        if batch < self.axis.size:
            call.generation.note(f"{self.name}: a batch of {batch} is run whole on each of {self.axis.size} ranks")
            return None
        if call.signature is None:
            call.signature = signature(
                call
            )  # of the whole batch: parts may differ in which ControlNet samples are zero
        sizes = split(batch, self.axis.size)
        at = start(sizes, self.axis.index)
        part = slice(at, at + sizes[self.axis.index])
        names = {position: name for name, position in call.denoiser.arguments.items()}
        call.args = tuple(cut_batch(value, batch, part, names.get(i, str(i))) for i, value in enumerate(call.args))
        call.kwargs = {name: cut_batch(value, batch, part, name) for name, value in call.kwargs.items()}
        self.split += 1
        return sizes

    def denoiser_out(self, call: Call) -> None:
        space = call.generation.memory(self)
        if space.sizes is not None:
            sizes, space.sizes = space.sizes, None
            call.sample = self._gather(call.sample, sizes)
            space.calls[-1].plannable = isinstance(call.sample, Tensor)
            return
        entry = space.calls[-1]
        if isinstance(call.sample, Tensor):
            sample = call.sample
            output = {"size": sample.shape, "dtype": sample.dtype, "device": sample.device}
            call.branch.memory(self).form = {"input": shape_of(call.input), "output": output}
        entry.plannable = isinstance(call.sample, Tensor)
        if call.generation.steps_done:  # nothing is left to others before; a pipeline without steps would pile them up
            entry.sample = call.sample
        if not space.certain or len(space.calls) == len(space.plans[call.denoiser.name]):
            self._fill(space)

    def _gather(self, sample: Any, sizes: tuple[int, ...]) -> Any:
        if isinstance(sample, Tensor):
            return all_gather(sample, sizes, self.axis.name)
        if len({item.shape for item in sample}) > 1:
            raise GenerationError(
                f"{self.name}: the samples of one batch differ in shape, and cannot be gathered; leave cfg out"
            )
        return list(all_gather(torch.stack(list(sample)), sizes, self.axis.name).unbind())

    def gathered(self, sums: Tensor) -> Tensor:
        """(2, B) of all samples where the call underway has a part of them, so that the worst of all decides on every rank."""
        call = ACTIVE.call
        sizes = call.generation.memory(self).sizes if call is not None else None
        if sizes is None:
            return sums
        each = max(1, sums.shape[1] // sizes[self.axis.index])  # trunks of videos may have a row a frame
        return all_gather_dim(sums, 1, [each * size for size in sizes], self.axis.name)

    def _fill(self, space: Any) -> None:
        """Every rank's samples to all ranks, into the tensors that the pipeline holds already."""
        for entry in space.calls:
            if entry.owner is None or entry.owner == FILLED:
                continue
            mine = entry.owner == self.axis.index
            message = entry.sample.contiguous() if mine else entry.sample
            dist.broadcast(message, src=self.axis.ranks[entry.owner], group=self.axis.group)
            entry.owner = FILLED

    # -- the step --------------------------------------------------------------------------------------------------

    def step_in(self, step: StepCall) -> None:
        """Raises:
        GenerationError: calls of several ranks were left open, so that no rank has what the step needs.
        RefusedError: the pipeline read a branch before the ranks had exchanged; on every rank, at the first such step.
        """
        space = step.generation.memory(self)
        calls, space.calls, space.certain = space.calls, [], True
        if not calls:
            return
        filled = any(entry.owner == FILLED for entry in calls)
        owners = {entry.owner for entry in calls if entry.owner is not None} - {FILLED}
        if len(owners) > 1:
            raise GenerationError(
                f"{self.name}: this step has {len(calls)} branches, fewer than the one before, and they are on ranks of their "
                "own; leave cfg out for guidance that changes in this way"
            )
        if owners:
            step.model_output = self._broadcast(step.model_output, owners.pop())
        elif filled and not space.proven:
            self._prove(step, calls)
            space.proven = True
        self._learn(space, calls)

    def _broadcast(self, tensor: Tensor, owner: int) -> Tensor:
        tensor = tensor.contiguous()
        dist.broadcast(tensor, src=self.axis.ranks[owner], group=self.axis.group)
        return tensor

    def _prove(self, step: StepCall, calls: list[Pending]) -> None:
        """That the pipeline has not read a tensor before it was filled."""
        samples = [entry.sample for entry in calls if isinstance(entry.sample, Tensor)]
        early = step.model_output.isnan().any() & ~torch.stack([sample.isnan().any() for sample in samples]).any()
        flag = early.to(torch.float32).reshape(1)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.axis.group)
        if flag.item():
            raise RefusedError(
                f"{self.name}: {type(step.generation.pipe).__name__} reads one branch before it runs the next, so they cannot "
                f"run on {self.axis.size} ranks at once; leave cfg out"
            )

    def _learn(self, space: Any, calls: list[Pending]) -> None:
        """The calls of this step, in the expectation that the next has the same."""
        plans: dict[str, list[Branch]] = {}
        for entry in calls:
            if entry.plannable:
                plans.setdefault(entry.branch.denoiser.name, []).append(entry.branch)
        space.plans = plans if len(plans) == 1 else {}

    def end(self, generation: Generation) -> None:
        if self.split or self.left or self._ran_foreign(generation):
            return
        why = "guidance was off, or a step had one branch and one sample" if generation.steps_done > 1 else None
        if not generation.steps_done and any(calls["computed"] > 1 for calls in generation.tally.values()):
            why = "the pipeline took no step of its scheduler, which tells where the calls of one step end"
        if why is not None:
            warnings.warn(
                f"{self.name}: nothing was divided over its {self.axis.size} ranks; {why}", ChituWarning, stacklevel=2
            )

    def _ran_foreign(self, generation: Generation) -> bool:
        """Whether some step was divided, and this rank left no call to another: it owned all that there was."""
        return bool(generation.memory(self).proven)

    def report(self) -> dict[str, Any]:
        return {"ranks": self.axis.size, "calls split": self.split, "calls left to other ranks": self.left}


def batch_of(call: Call) -> int:
    """Samples in the batch: dim 0 of the denoiser's first argument, or its length if that is a list."""
    value = call.args[0] if call.args else call.argument(next(iter(call.denoiser.arguments)))
    return value.shape[0] if isinstance(value, Tensor) else len(value) if isinstance(value, (list, tuple)) else 1


def shape_of(value: Any) -> Any:
    """Shape of a tensor, or of each in a list."""
    return value.shape if isinstance(value, Tensor) else [item.shape for item in value]


def cut_batch(value: Any, batch: int, part: slice, name: str) -> Any:
    """The samples `part` of an argument: of tensors whose dim 0 is the batch, and of lists with one tensor a sample.

    Raises:
        GenerationError: a list that could be either one tensor a sample or several tensors of all samples.
    """
    if isinstance(value, Tensor):
        return value[part] if value.dim() and value.shape[0] == batch else value
    if isinstance(value, dict):
        return {key: cut_batch(item, batch, part, f"{name}.{key}") for key, item in value.items()}
    if not isinstance(value, (list, tuple)) or not value:
        return value
    tensors = all(isinstance(item, Tensor) for item in value)
    whole = any(isinstance(item, Tensor) and item.dim() > 1 and item.shape[0] == batch for item in value)
    if tensors and len(value) == batch:
        if whole:
            raise GenerationError(
                f"cfg parallel: {name} has {len(value)} tensors of {batch} rows, and whether it is one a sample cannot be seen; "
                "leave cfg out"
            )
        return value[part]
    return type(value)(cut_batch(item, batch, part, name) for item in value)
