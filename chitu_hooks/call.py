"""The calls that features see: of the denoiser, of a block, and of the scheduler's step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .spans import Spans
from .state import Branch, Generation, Step, Streams

if TYPE_CHECKING:
    from .engine import Engine
    from .feature import Feature
    from .sites import BlockSite, DenoiserSite


NOTHING = Spans()
"""No block can be skipped."""


class StackRun:
    """What one stack has gone through in the call that is underway."""

    __slots__ = ("entry", "exited", "first_at", "front_entry", "last_at", "last_index", "last_inside", "probe")

    def __init__(self, first_at: int = 0) -> None:
        self.entry: Streams | None = None
        """The streams at the first block called of those that can be skipped."""
        self.front_entry: Streams | None = None
        """The streams at the first block, in the stack where the front blocks end."""
        self.last_index = -1
        self.first_at = self.last_at = first_at
        """Among the block calls of the denoiser call, the number of this stack's first and last."""
        self.last_inside = -1
        """The last block called of those that can be skipped."""
        self.exited = False
        self.probe: Any = None
        """Inputs and outputs of the block before, while the stack is being inferred."""


class BlockInputs:
    """The arguments of one block call, by name."""

    __slots__ = ("args", "block", "kwargs")

    def __init__(self, block: BlockSite, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.block = block
        self.args = args
        self.kwargs = kwargs

    def get(self, name: str) -> Any:
        """The argument `name`, or None if the block was called without it."""
        if name in self.kwargs:
            return self.kwargs[name]
        position = self.block.arguments[name]
        return self.args[position] if position < len(self.args) else None

    def set(self, name: str, value: Any) -> None:
        """Replace the argument `name`."""
        position = self.block.arguments[name]
        if name not in self.kwargs and position < len(self.args):
            self.args = (*self.args[:position], value, *self.args[position + 1 :])
        else:
            self.kwargs = {**self.kwargs, name: value}

    def streams(self) -> Streams:
        """Role -> tensor of the stack's streams."""
        streams = self.block.stack.streams
        return {role: self.get(name) for role, name in streams.items()} if streams else {}

    def replace(self, streams: Streams) -> None:
        """Put other stream tensors in place."""
        names = self.block.stack.streams or {}
        for role, value in streams.items():
            if role in names:
                self.set(names[role], value)


class Call:
    """One denoiser call: one branch of one step.

    Attributes:
        attention: the features of the attention seam in this call; `Feature.denoiser_in` may put another feature in its
            own place. Keep the tuples: compiled code is chosen by them, a graph for each.
        args, kwargs: the arguments, which features may change before the denoiser runs.
        output: what the denoiser returned; `sample` is its first tensor.
        skipping: the trunk is being skipped.
        spans: the blocks that are left out when the trunk is skipped.
        entry: the arguments of the trunk's first block, from `Feature.trunk_in` on.
        replaced: the denoiser did not run at all.
        elsewhere: nor was it left out: another process runs this call, and the output is only room for its result.
    """

    __slots__ = (
        "args",
        "attention",
        "block_calls",
        "branch",
        "denoiser",
        "elsewhere",
        "engine",
        "entry",
        "generation",
        "kwargs",
        "output",
        "replaced",
        "residuals",
        "runs",
        "signature",
        "skipping",
        "spans",
        "step",
        "trunk_entered",
        "trunk_left",
    )

    def __init__(
        self,
        engine: Engine,
        generation: Generation,
        denoiser: DenoiserSite,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.engine = engine
        self.generation = generation
        self.denoiser = denoiser
        self.args = args
        self.kwargs = kwargs
        self.attention: tuple[Feature, ...] | None = None
        self.output: Any = None
        self.skipping = False
        self.replaced = False
        self.elsewhere = False
        self.spans = NOTHING
        self.entry: BlockInputs | None = None
        self.runs: dict[int, StackRun] = {}
        self.block_calls = 0
        self.trunk_entered = False
        self.trunk_left = False
        self.residuals: dict[int, dict[str, torch.Tensor | None]] | None = None
        self.step: Step
        self.branch: Branch
        self.signature: Any = None

    def argument(self, name: str) -> Any:
        """The denoiser's argument `name`, or None if it was called without it."""
        if name in self.kwargs:
            return self.kwargs[name]
        position = self.denoiser.arguments.get(name)
        return self.args[position] if position is not None and position < len(self.args) else None

    def set_argument(self, name: str, value: Any) -> None:
        """Replace the denoiser's argument `name`."""
        position = self.denoiser.arguments.get(name)
        if name not in self.kwargs and position is not None and position < len(self.args):
            self.args = (*self.args[:position], value, *self.args[position + 1 :])
        else:
            self.kwargs = {**self.kwargs, name: value}

    @property
    def can_skip(self) -> bool:
        """Whether this branch has a residual for every stack that it runs, taken from a call of the same signature."""
        return self.branch.skippable and self.branch.signature == self.signature

    def skip_trunk(self, residuals: dict[int, dict[str, torch.Tensor | None]] | None = None) -> None:
        """Skip the trunk in this call, but for its front and back blocks: what is left out adds the residual.

        To be called in `Feature.denoiser_in`, `trunk_in` or `front_out`.

        Args:
            residuals: stack number -> role -> tensor shaped like the stream, in place of `Branch.residuals`, a forecast
                say; it has the same stacks and roles.

        Raises:
            ValueError: `can_skip` is False.
        """
        if not self.can_skip:
            raise ValueError(f"{self.branch.name} has no residual of this signature at {self.step}; ask can_skip first")
        self.residuals = residuals if residuals is not None else self.branch.residuals
        self.skipping = True

    @property
    def input(self) -> Any:
        """The denoiser's first argument, the noisy sample: a tensor, or a list of them in some models."""
        return self.args[0] if self.args else self.kwargs.get(next(iter(self.denoiser.arguments)))

    @property
    def sample(self) -> Any:
        """The denoiser's prediction, the first entry of its output: a tensor, or a list of them in some models."""
        output = self.output
        return output if isinstance(output, torch.Tensor) else output[0]

    @sample.setter
    def sample(self, value: Any) -> None:
        self.output = with_first(self.output, value)


def with_first(output: Any, value: Any) -> Any:
    """`output` with `value` in place of its first entry: a tensor, a tuple, a list or a diffusers output class."""
    if output is None or isinstance(output, torch.Tensor):
        return value
    if isinstance(output, (tuple, list)):
        return type(output)((value, *output[1:]))
    fields = dict(output)
    fields[next(iter(fields))] = value
    return type(output)(**fields)


class StepCall:
    """One ``scheduler.step``: what goes in and, afterwards, what came out.

    Attributes:
        result: what the scheduler returned; `sample` of it is the next latent.
    """

    __slots__ = ("args", "generation", "kwargs", "result", "step")

    NAMES = ("model_output", "timestep", "sample")

    def __init__(self, generation: Generation, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.generation = generation
        self.step = step
        self.args = args
        self.kwargs = kwargs
        self.result: Any = None

    def _get(self, position: int) -> Any:
        return self.args[position] if position < len(self.args) else self.kwargs[self.NAMES[position]]

    def _set(self, position: int, value: Any) -> None:
        if position < len(self.args):
            self.args = (*self.args[:position], value, *self.args[position + 1 :])
        else:
            self.kwargs = {**self.kwargs, self.NAMES[position]: value}

    @property
    def model_output(self) -> torch.Tensor:
        """The guided prediction that the scheduler takes."""
        return self._get(0)

    @model_output.setter
    def model_output(self, value: torch.Tensor) -> None:
        self._set(0, value)

    @property
    def sample(self) -> torch.Tensor:
        """The latent that the scheduler takes."""
        return self._get(2)

    @sample.setter
    def sample(self, value: torch.Tensor) -> None:
        self._set(2, value)

    @property
    def next_sample(self) -> torch.Tensor:
        """The latent that the scheduler returned."""
        return self.result[0]

    @next_sample.setter
    def next_sample(self, value: torch.Tensor) -> None:
        self.result = with_first(self.result, value)


def map_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """`value` with `function` applied to every tensor in its tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(item, function) for item in value)
    if isinstance(value, dict):
        return {key: map_tensors(item, function) for key, item in value.items()}
    return value
