"""What lives for one generation: its steps, its branches and their memory, and the call that is underway.

Everything here is created when ``pipe(...)`` is entered and dropped when it is left, whichever way.
"""

from __future__ import annotations

import threading
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .call import Call
    from .feature import Feature
    from .sites import DenoiserSite
    from .spans import Spans

Streams = dict[str, Any]
"""Role (`image`, `text`, `joint`; an argument name in an inferred stack) -> (B, S, C) tensor, or None where there is none."""


class Active(threading.local):
    """What this thread is inside of just now. Set on entering a denoiser, reset on leaving it.

    The attributes are made in `__init__` because torch.compile guards on the keys of the instance.
    """

    def __init__(self) -> None:
        self.call: Call | None = None
        self.attention: tuple[Feature, ...] | None = None
        """The features of the attention seam, read by traced code: None outside a hooked denoiser."""
        self.layers: tuple[Feature, ...] = ()
        """Those of them that have an `attention_layer`; traced code does not read it."""
        self.frame: Any = None
        """The processor call that is underway, see `attention.Frame`."""
        self.layout: Any = None
        """Which tokens of the trunk that is underway are here, for traced code; set by the feature that spreads or cuts them."""
        self.cache_context: str | None = None
        """Name of the `cache_context` that the pipeline has entered."""


ACTIVE = Active()


class Memory:
    """Per-feature name spaces: ``memory(feature).anything = ...``."""

    def __init__(self) -> None:
        self._spaces: dict[str, SimpleNamespace] = {}

    def __call__(self, feature: Feature) -> SimpleNamespace:
        space = self._spaces.get(feature.name)
        if space is None:
            space = self._spaces[feature.name] = SimpleNamespace()
        return space

    @property
    def spaces(self) -> dict[str, SimpleNamespace]:
        return self._spaces


class Step:
    """One model evaluation asked for by the scheduler.

    Attributes:
        index: number of the evaluation in this generation, from 0; the two stages of an order-2 step count twice.
        position: place in the schedule, from 0; both stages of an order-2 step share it.
        stage: 0, or 1 for the second evaluation of an order-2 step.
    """

    __slots__ = ("generation", "index", "position", "schedule_index", "stage")

    def __init__(self, generation: Generation, index: int, schedule_index: int) -> None:
        self.generation = generation
        self.index = index
        self.schedule_index = schedule_index
        order = generation.order
        self.position, self.stage = divmod(index, order) if order > 1 else (index, 0)

    @property
    def timestep(self) -> float | None:
        """The scheduler's timestep; the first use in a generation copies the schedule to the host, once."""
        values = self.generation.timestep_values
        return values[self.schedule_index] if values and self.schedule_index < len(values) else None

    def __repr__(self) -> str:
        return f"Step({self.position} of {self.generation.num_steps}, stage {self.stage})"


class Branch:
    """One of the passes that guidance asks for: conditional, unconditional or a further one, with its own state.

    Attributes:
        name: the pipeline's `cache_context`, else ``branch N`` in the order of first appearance.
        residuals: stack number -> role -> exit minus entry of the last computed call, shaped like the stream; or the exit,
            for a feature with ``reuses = "output"``.
        last_called: stack number -> index of the last block that ran in the last computed call.
        last_inside: the same, of the blocks that can be skipped.
        signature: shapes and presence of the denoiser's arguments in the last computed call.
        computed, skipped, replaced, elsewhere: number of calls of each kind; `elsewhere`, see `Call.elsewhere`, is in no tally
            unless there are such calls.
    """

    def __init__(self, denoiser: DenoiserSite, name: str, ordinal: int, values: tuple[Any, ...], held: Any) -> None:
        self.denoiser = denoiser
        self.name = name
        self.ordinal = ordinal
        self.values = values
        self.held = held
        """The conditioning tensors: held so that no other tensor can take their address in this generation."""
        self.memory = Memory()
        self.residuals: dict[int, dict[str, torch.Tensor | None]] = {}
        self.last_called: dict[int, int] = {}
        self.last_inside: dict[int, int] = {}
        self.spans: Spans | None = None
        """The blocks that are left out when the trunk is skipped; None before the branch was computed."""
        self.signature: Any = None
        self.skippable = False
        """Whether the last computed call left a residual for every stack that it ran and whose streams are known."""
        self.computed = 0
        self.skipped = 0
        self.replaced = 0
        self.elsewhere = 0

    def forget(self) -> None:
        """Drop the residuals and what every feature keeps, so that the next call is computed."""
        self.residuals, self.memory, self.skippable = {}, Memory(), False


KINDS = ("computed", "skipped", "replaced")
"""Kinds of calls that every tally has."""


class Generation:
    """One ``pipe(...)`` call.

    Attributes:
        args, kwargs: what the pipeline was called with.
        scheduler: the scheduler that the pipeline had when the generation began.
        order: model evaluations per step of the scheduler.
        branches: every branch seen since the schedule was set.
        saved_flops: FLOPs that features saved inside computed calls.
        notes: things the report should say about this generation, each once.
    """

    def __init__(self, pipe: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> None:
        self.pipe = pipe
        self.args = args
        self.kwargs = kwargs or {}
        self.thread = threading.get_ident()
        self.paused = False
        """In a callback of the user: what runs there, a sibling that shares the denoiser say, is not this generation."""
        self.scheduler: Any = getattr(pipe, "scheduler", None)
        self.order = int(getattr(self.scheduler, "order", 1) or 1)
        self.memory = Memory()
        self.entered = False
        """Whether a denoiser was called."""
        self.branches: list[Branch] = []
        self.branch_keys: dict[Any, Branch] = {}
        self.steps_done = 0
        self.timesteps: Any = None
        self._timestep_values: list[float] | None = None
        self._first_index: int | None = None
        self._step: Step | None = None
        self.ordinals: dict[str, int] = {}
        self.notes: dict[str, None] = {}
        self.tally: dict[tuple[str, str], dict[str, int]] = {}
        self.peak_bytes = 0
        self.saved_flops = 0
        self.fewer: dict[tuple[str, str], Counter[int]] = {}
        """Denoiser and branch -> number of image tokens -> calls that computed only so many."""
        self.left_out: dict[tuple[str, str], Counter[str]] = {}
        """Denoiser and branch -> path of a module of the denoiser -> calls in which that module alone was not run."""

    @property
    def running_here(self) -> bool:
        """Whether what this thread does just now is part of this generation."""
        return not self.paused and self.thread == threading.get_ident()

    # -- the schedule ----------------------------------------------------------------------------------------------

    def new_schedule(self, timesteps: Any) -> None:
        """The scheduler's timesteps were set: a new run of steps starts, and nothing is carried into it."""
        if self.steps_done:
            self.close_schedule()
        self.timesteps = timesteps
        self._timestep_values = None
        self._first_index = None
        self._step = None
        self.steps_done = 0
        self.ordinals.clear()

    def close_schedule(self) -> None:
        """Drop every branch, keeping the numbers that the report needs."""
        self.measure_held()
        for branch in self.branches:
            tally = self.tally.setdefault((branch.denoiser.name, branch.name), dict.fromkeys(KINDS, 0))
            for key in (*KINDS, *("elsewhere",) * bool(branch.elsewhere)):
                tally[key] = tally.get(key, 0) + getattr(branch, key)
        self.branches.clear()
        self.branch_keys.clear()

    @property
    def timestep_values(self) -> list[float]:
        if self._timestep_values is None:
            values = self.timesteps
            self._timestep_values = [] if values is None else [float(t) for t in torch.as_tensor(values).tolist()]
        return self._timestep_values

    @property
    def num_steps(self) -> int | None:
        """Number of schedule positions of this run: img2img strength counts, guidance branches do not.

        None before the first step of a pipeline that cuts its timesteps without telling the scheduler.
        """
        if self.timesteps is None:
            return None
        first = self._first_index if self._first_index is not None else getattr(self.scheduler, "begin_index", 0)
        if first is None:
            return None
        evaluations = len(self.timesteps) - first
        return -(-evaluations // self.order)

    @property
    def positions(self) -> int:
        """Number of schedule positions that have run, so far."""
        return -(-self.steps_done // self.order)

    def current_step(self) -> Step:
        """The step that the next denoiser call belongs to, by the scheduler's own index."""
        scheduler = self.scheduler
        index = getattr(scheduler, "step_index", None)
        if index is None:
            index = getattr(scheduler, "begin_index", None)
            if index is None:
                index = (self._first_index or 0) + self.steps_done
        step = self._step
        if step is not None and step.schedule_index == index:
            return step
        if self._first_index is None and (self.steps_done or getattr(scheduler, "begin_index", None) is not None):
            self._first_index = index - self.steps_done
        self.ordinals.clear()
        self._step = Step(self, index - (self._first_index or 0), index)
        return self._step

    def learn_first_index(self) -> None:
        """After the first ``scheduler.step``: the scheduler has found out where in the schedule it started."""
        index = getattr(self.scheduler, "step_index", None)
        if self._first_index is None:
            self._first_index = index - self.steps_done if index is not None else 0

    # -- what the report needs -------------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        self.notes[text] = None

    def measure_held(self) -> None:
        """Take account of what is held just now. To be called where it may have grown."""
        self.peak_bytes = max(self.peak_bytes, self.held_bytes())

    def held_bytes(self) -> int:
        """Bytes of the tensors that branches and features hold just now, each storage once."""
        seen: dict[int, int] = {}
        for branch in self.branches:
            _collect(branch.residuals, seen)
            _collect(branch.memory.spaces, seen)
        _collect(self.memory.spaces, seen)
        return sum(seen.values())


_PLAIN = frozenset({int, float, bool, str, type(None), torch.Size})
"""Types of what is kept most often and holds no tensors: signatures of calls are long."""


def _collect(value: Any, seen: dict[int, int]) -> None:
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if type(item) in _PLAIN:
            continue
        if isinstance(item, torch.Tensor):
            storage = item.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
        elif isinstance(item, dict):
            waiting.extend(item.values())
        elif isinstance(item, (list, tuple)):
            waiting.extend(item)
        elif isinstance(item, SimpleNamespace):
            waiting.extend(vars(item).values())
