"""The parameters of every strategy: frozen, checked, and readable from the command line."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import yaml

from chitu_hooks import PatchError
from chitu_hooks.errors import nearest

from .constants import published_schedule
from .limits import Params
from .planning.params import Planned
from .schedule import SCHEDULES


@dataclass(frozen=True, kw_only=True)
class Scheduled(Params):
    """Parameters of strategies that know before the run which positions are computed.

    Published schedules (LeMiCa, https://arxiv.org/abs/2511.00090; MeanCache, https://arxiv.org/abs/2601.19961) are asked for by
    name, see ``adapters/data``. Nothing waits for the device.
    """

    steps: tuple[int, ...] | str
    """Schedule positions to compute, from 0; or `uniform` or `growing` (dense at the start) with a `budget`; or the name
    of a published schedule, which is stretched to the number of steps of the generation."""
    budget: int | None = None
    """For `uniform` and `growing`: positions to compute, at least 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._whole("budget", least=1, optional=True)
        if isinstance(self.steps, str):
            if (self.steps in SCHEDULES) != (self.budget is not None):
                raise PatchError(
                    f"{self.strategy}: budget, the number of steps to compute, belongs to {' and '.join(SCHEDULES)}; "
                    f"got steps={self.steps!r} and budget={self.budget!r}"
                )
            if self.budget is None:
                published_schedule(self.steps, self.strategy)
            return
        if self.budget is not None:
            raise PatchError(f"{self.strategy}: budget belongs to {' and '.join(SCHEDULES)}, not to a list of steps")
        object.__setattr__(self, "steps", checked_steps(self.strategy, self.steps))


@dataclass(frozen=True, kw_only=True)
class Static(Scheduled):
    """Compute the given steps; at the others skip the trunk and add the residual of the computed ones."""

    strategy: ClassVar[str] = "static"

    forecast: str = "hold"
    """What stands for the residual at a skipped step: `hold`, the last computed one; `linear`, the line through the last
    two; `damped`, half of its rise (HiCache, https://arxiv.org/abs/2508.16984), where gaps are long."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._word("forecast", ("hold", "linear", "damped"))


@dataclass(frozen=True, kw_only=True)
class MeanCache(Scheduled):
    """Compute the given steps; between them give the scheduler the mean velocity over the gap, and run nothing.

    MeanCache, https://arxiv.org/abs/2601.19961, on the guided prediction. With ``window=1`` the last prediction is held, which
    for an Euler flow scheduler is one larger step. From the first gap on the latent is kept in float32.
    """

    strategy: ClassVar[str] = "meancache"

    window: int = 1
    """Positions back from the last computed one over which the velocity's slope is taken (K), at least 1; more than 1
    needs an Euler flow-matching scheduler."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._whole("window", least=1)


def checked_steps(strategy: str, given: Any) -> tuple[int, ...]:
    """A list of positions, sorted.

    Raises:
        PatchError: a step is negative or no whole number, or step 0 is missing.
    """
    steps = given if isinstance(given, (tuple, list, set, frozenset, range)) else (given,)
    if not all(isinstance(step, int) and not isinstance(step, bool) and step >= 0 for step in steps):
        raise PatchError(f"{strategy}: steps are whole numbers from 0, not {given!r}")
    if 0 not in steps:
        raise PatchError(f"{strategy}: step 0 has nothing to reuse; add 0 to steps={tuple(sorted(steps))}")
    return tuple(sorted(set(steps)))


@dataclass(frozen=True, kw_only=True)
class FBCache(Params):
    """Compute the first blocks, and skip the middle ones while what the first ones add hardly changes.

    First-block cache of ParaAttention (https://github.com/chengzeyi/ParaAttention) with ``front=1, back=0``; DBCache of
    cache-dit (https://github.com/vipshop/cache-dit) with more of either, such as ``front=8, threshold=0.08, warmup=8``.
    """

    strategy: ClassVar[str] = "fbcache"

    threshold: float = 0.08
    """Skip while the relative L1 change of the front residual since the last computed step is below this; 0 computes all."""
    front: int = 1
    """Blocks at the start of the trunk that are always computed (Fn), at least 1; refiners do not count."""
    back: int = 0
    """Blocks at the end of the trunk that are always computed (Bn), at least 0."""
    order: int = 0
    """Order of the forecast of the middle residual, 0 to 4; 0 holds the last one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._number("threshold")
        self._whole("front", least=1)
        self._whole("back", least=0)
        self._whole("order", least=0, most=4)


@dataclass(frozen=True, kw_only=True)
class MagCache(Params):
    """Skip while the product of published or measured ratios of residual magnitudes stays near 1.

    Ma et al. 2025, https://arxiv.org/abs/2506.09045. The ratios belong to a model and are stretched to any number of steps;
    where none are published, `chitu calibrate` measures them. Decisions wait for nothing and are the same for every batch.
    """

    strategy: ClassVar[str] = "magcache"

    threshold: float = 0.06
    """Most accumulated error, a sum of |1 - product of ratios|; 0 computes all."""
    max_consecutive: int | None = 3
    """Most positions to skip in a row, at least 1; None sets no limit."""
    retention: float = 0.2
    """Part of the steps at the start that is always computed, 0 to 1."""
    ratios: tuple[float, ...] | None = None
    """Ratio of each position's residual magnitude to that of the one before, from position 1; None takes them from
    `constants`, else the published ones of this model."""
    constants: str | None = None
    """File that `chitu calibrate` wrote."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._number("threshold")
        self._file("constants")
        self._number("retention", most=1.0)
        if self.ratios is not None:
            ratios = self.ratios if isinstance(self.ratios, (tuple, list)) else (self.ratios,)
            if not all(isinstance(r, (int, float)) and not isinstance(r, bool) and 0 < r < math.inf for r in ratios):
                raise PatchError(f"magcache: ratios are numbers above 0, not {self.ratios!r}")
            object.__setattr__(self, "ratios", tuple(float(r) for r in ratios))


@dataclass(frozen=True, kw_only=True)
class EasyCache(Params):
    """Skip while the change of the output, predicted from that of the input, adds up to less than a threshold.

    Zhou et al. 2025, https://arxiv.org/abs/2507.02860. Needs no blocks and no data of the model: a skipped step runs nothing of the
    denoiser; the output is the input plus the last difference of the two.
    """

    strategy: ClassVar[str] = "easycache"

    threshold: float = 0.05
    """Compute once the accumulated relative change reaches this; 0 computes all."""
    warmup: int = 5
    """Positions at the start that are always computed, at least 1."""
    cooldown: int = 1
    """Positions at the end that are always computed, at least 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._number("threshold")


@dataclass(frozen=True, kw_only=True)
class TaylorSeer(Params):
    """Compute every `interval`-th step, and forecast between them by finite differences.

    Liu et al. 2025, https://arxiv.org/abs/2503.06923, on whole blocks: forecasting what each block adds and summing is the same as
    forecasting the sum, which takes one tensor a stream instead of one a block, and this is what is done. The paper's own
    form is another forecast: it forecasts the outputs of attention and MLP before the gates, which this step's timestep
    sets. It takes many times the memory and was about as near at equal FLOPs, see ``docs/negative-results.md``.
    """

    strategy: ClassVar[str] = "taylorseer"

    interval: int = 4
    """Compute one position in this many after `warmup`, at least 1; 1 computes all."""
    ramp: bool = True
    """Let the gaps after `warmup` grow by one, from 2 to `interval`; no takes `interval` at once, as the paper does. Early gaps
    decide most of the picture, and a slope that was taken over one step does not carry far."""
    order: int = 1
    """Highest difference that is used, 0 to 4; 0 holds the last value."""
    damping: float = 0.5
    """Part of the way that the forecast goes, 0 to 1: 1 is Taylor's, 0 holds; 0.5 is the first order of HiCache,
    https://arxiv.org/abs/2508.16984, which does not run past the next value where gaps are long."""
    of: str = "residual"
    """What is forecast: `residual`, what the trunk adds to this step's input; `feature`, what leaves the trunk, whatever
    went in."""
    warmup: int = 3
    """Positions at the start that are always computed, at least 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._whole("interval", least=1)
        self._choice("ramp")
        self._whole("order", least=0, most=4)
        self._number("damping", most=1.0)
        self._word("of", ("residual", "feature"))


@dataclass(frozen=True, kw_only=True)
class TeaCache(Params):
    """Skip while the predicted change of the trunk's output adds up to less than a threshold.

    Liu et al. 2024, https://arxiv.org/abs/2411.19108: a polynomial, fitted for each model, of the relative change of the first
    block's modulated input. Where none is published, `chitu calibrate` fits one to the trunk's input.
    """

    strategy: ClassVar[str] = "teacache"

    threshold: float = 0.25
    """Compute once the accumulated predicted change reaches this; 0 computes all."""
    cooldown: int = 1
    """Positions at the end that are always computed, at least 0."""
    coefficients: tuple[float, ...] | None = None
    """Polynomial of the relative change of the trunk's input, highest power first; None takes it from `constants`, else
    the published one of this model with the signal that it was fitted for."""
    constants: str | None = None
    """File that `chitu calibrate` wrote."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._number("threshold")
        self._file("constants")
        if self.coefficients is not None:
            given = self.coefficients if isinstance(self.coefficients, (tuple, list)) else (self.coefficients,)
            if not given or not all(isinstance(c, (int, float)) and math.isfinite(c) for c in given):
                raise PatchError(f"teacache: coefficients are finite numbers, not {self.coefficients!r}")
            object.__setattr__(self, "coefficients", tuple(float(c) for c in given))


@dataclass(frozen=True, kw_only=True)
class BlockDance(Params):
    """Later in the run, reuse what the front of the trunk returned at the first step of a group, and compute the rest.

    Zhang et al. 2025, https://arxiv.org/abs/2503.15927: features in the front of the trunk settle early. Modest savings at a high
    fidelity, without data of the model.
    """

    strategy: ClassVar[str] = "blockdance"

    boundary: float = 0.35
    """Part of the blocks, from the front, that is reused, 0 to 1; at least one block is reused and one computed. The paper's
    20 of the 57 blocks of FLUX.1."""
    group: int = 2
    """Positions in a group: the first is computed, the others reuse its features; at least 1, which computes all."""
    begin: float = 0.4
    """Part of the steps before the first group, 0 to 1."""
    end: float = 0.95
    """Part of the steps at which the last group ends, 0 to 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._number("boundary", most=1.0)
        self._whole("group", least=1)
        self._number("begin", most=1.0)
        self._number("end", most=1.0)


@dataclass(frozen=True, kw_only=True)
class PAB(Params):
    """In the middle of the run, compute attention at one step in a few and reuse its output at the others.

    Pyramid Attention Broadcast, Zhao et al. 2024, https://arxiv.org/abs/2408.12588. The rest of each block is computed, so the most
    that can be saved is attention's part of the FLOPs; with ``kinds="all"`` projections are part of it, but for layers that do more
    than attend. Keeps one output for every layer and branch.
    """

    strategy: ClassVar[str] = "pab"

    interval: int = 2
    """Compute one position in this many inside the window, at least 1; 1 computes all."""
    kinds: str = "all"
    """Which attention: `self` (joint attention of text and image included), `cross`, or `all`."""
    begin: float = 0.1
    """Part of the steps before the window, 0 to 1."""
    end: float = 0.9
    """Part of the steps at which the window ends, 0 to 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._whole("interval", least=1)
        self._word("kinds", ("self", "cross", "all"))
        self._number("begin", most=1.0)
        self._number("end", most=1.0)


@dataclass(frozen=True, kw_only=True)
class Cubic(Params):
    """Freeze the tokens of calm regions for some steps, and compute only the others.

    Jano, Chen et al. 2026, https://arxiv.org/abs/2603.00519, on image tokens: after `warmup` each region of a picture is static,
    medium or active by how much the distances between its tokens still change. Other tokens go on to attend to the frozen
    ones, whose keys and values are kept, one pair for every layer and branch. Text is computed with them. Regions are runs of
    tokens, not squares, and the paper's spreading of scores into the inside of shapes is left out. One set of tokens serves
    the whole batch and all branches of guidance.

    Three things differ from the paper, each for more fidelity at equal FLOPs (``docs/negative-results.md``): frozen tokens
    follow half of the rise of their last two values; all tokens are computed every fourth position and not every tenth; and
    active tokens have an interval too. At a position where no token is due no block runs, which is what saves time on
    a small model: there a step on half of the tokens launches as many kernels as one on all.
    """

    strategy: ClassVar[str] = "cubic"

    warmup: int = 5
    """Positions at the start that are always computed and watched, at least 1; no token is frozen before the third."""
    cooldown: int = 1
    """Positions at the end that are always computed, at least 0."""
    static: float = 0.2
    """Regions with a score below this are static, 0 to 1, where 0 is the calmest region of a picture and 1 the liveliest."""
    medium: float = 0.3
    """Regions that are not static and have a score below this are medium, 0 to 1; 0 freezes nothing and computes all."""
    static_interval: int = 4
    """Positions from one at which static tokens are computed, and with them all, to the next, at least 1; 1 computes all."""
    medium_interval: int = 4
    """Positions from one at which medium tokens are computed to the next, at least 1: the first at which active ones are too.
    From `static_interval` on they are computed with the static ones."""
    active_interval: int = 2
    """Positions from one at which active tokens are computed to the next, at least 1; 1 computes them at every one."""
    region: int = 4
    """Tokens of a region, one after the other in the model's order, at least 2."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._number("static", most=1.0)
        self._number("medium", most=1.0)
        self._whole("static_interval", least=1)
        self._whole("medium_interval", least=1)
        self._whole("active_interval", least=1)
        self._whole("region", least=2)


PARAMS: dict[str, type[Params]] = {
    cls.strategy: cls
    for cls in (Static, FBCache, MagCache, EasyCache, TaylorSeer, TeaCache, MeanCache, BlockDance, PAB, Cubic, Planned)
}
"""Strategy name -> its parameters."""


def make_params(name: str, options: Mapping[str, Any] | None = None) -> Params:
    """The parameters of strategy `name` from words, as on the command line.

    Args:
        name: a key of `PARAMS`.
        options: field name -> value; text is read as YAML, and `0,1,2` is a list.

    Raises:
        PatchError: no such strategy or field, or a value out of range; the message has the nearest names.
    """
    cls = PARAMS.get(name)
    if cls is None:
        raise PatchError(f"no cache {name!r}{nearest(name, PARAMS)}")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    values = {}
    for key, value in (options or {}).items():
        if key not in fields:
            raise PatchError(f"{name} has no parameter {key!r}{nearest(key, fields)}")
        values[key] = _read(value) if isinstance(value, str) else value
    missing = [n for n, field in fields.items() if field.default is dataclasses.MISSING and n not in values]
    if missing:
        raise PatchError(
            f"{name} needs {missing[0]}: give {cls.__name__}({missing[0]}=…) in Python, or --cache-arg {missing[0]}=…"
        )
    return cls(**values)


def _read(text: str) -> Any:
    try:
        if "," in text:
            return tuple(yaml.safe_load(f"[{text.strip('[]()')}]"))
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise PatchError(f"{text!r} is not a value: {error}") from error
