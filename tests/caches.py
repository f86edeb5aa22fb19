"""Parameters of every strategy for the tests of caches, and a feature that logs what a cache did."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from chitu_diffusion import (
    PAB,
    BlockDance,
    Cubic,
    EasyCache,
    FBCache,
    MagCache,
    MeanCache,
    Planned,
    Static,
    TaylorSeer,
    TeaCache,
    patch,
)
from chitu_diffusion.flexcache import Params, Profile
from chitu_diffusion.flexcache.constants import model_of
from chitu_diffusion.flexcache.planning.gram import Tables
from chitu_diffusion.flexcache.planning.grid import Grid, prediction_of
from chitu_diffusion.flexcache.planning.key import Key
from chitu_hooks import Feature, Order

STEPS = 10
RATIOS = (1.0,) * (STEPS - 1)

ACTS: dict[str, Params] = {
    "static": Static(steps=(0, 1, 3, 6)),
    "static linear": Static(steps=(0, 1, 3, 6), forecast="linear"),
    "static uniform": Static(steps="uniform", budget=4),
    "static growing": Static(steps="growing", budget=5, forecast="linear"),
    "static published": Static(steps="lemica-flux-15"),
    "fbcache": FBCache(threshold=50.0),
    "fbcache back": FBCache(threshold=50.0, back=1, order=1, max_consecutive=2),
    "magcache": MagCache(ratios=RATIOS),
    "easycache": EasyCache(threshold=50.0, warmup=3),
    "teacache": TeaCache(threshold=5.0, coefficients=(1.0, 0.0)),
    "meancache": MeanCache(steps=(0, 1, 3, 6)),
    "blockdance": BlockDance(begin=0.2, group=3),
    "pab": PAB(interval=3),
    "planned": Planned(budget=0.4, stretch=True),
    "planned guarded": Planned(speedup=2.5, stretch=True, guard=2),
    "cubic": Cubic(warmup=2, static=0.4, medium=0.7, static_interval=6, medium_interval=3, active_interval=2, region=2),
    "taylorseer": TaylorSeer(order=2, interval=3),
    "taylorseer feature": TaylorSeer(order=1, interval=3, of="feature"),
}
"""Parameters that skip on every tiny pipeline at `STEPS` steps."""

EXACT: dict[str, Params] = {
    "static": Static(steps=range(STEPS)),
    "static uniform": Static(steps="uniform", budget=STEPS),
    "static growing": Static(steps="growing", budget=STEPS, forecast="linear"),
    "fbcache": FBCache(threshold=0.0, order=1),
    "magcache": MagCache(threshold=0.0, ratios=RATIOS),
    "easycache": EasyCache(threshold=0.0, warmup=1, cooldown=0),
    "teacache": TeaCache(threshold=0.0, coefficients=(1.0, 0.0), cooldown=0),
    "meancache": MeanCache(steps=range(STEPS)),
    "blockdance": BlockDance(group=1),
    "pab": PAB(interval=1),
    "planned": Planned(budget=1.0, stretch=True),
    "planned guarded": Planned(speedup=1, guard=3, stretch=True),
    "cubic": Cubic(medium=0.0, warmup=1),
    "cubic often": Cubic(static_interval=1, warmup=1),
    "taylorseer": TaylorSeer(interval=1, order=2),
    "taylorseer feature": TaylorSeer(interval=1, of="feature"),
    "warmup": FBCache(threshold=50.0, warmup=STEPS),
}
"""Parameters that never skip."""


def one_each(table: dict[str, Params]) -> dict[str, Params]:
    """One entry of `table` for each strategy: what is left out are other schedules of the same machinery."""
    return {label: params for label, params in table.items() if label == params.strategy}


REFUSED = {"cubic": ("sana", "hidream", "mochi", "hunyuan_dit"), "planned": ("hunyuan_dit",)}
"""Strategy -> pipelines that it refuses: no map says which arguments of their blocks have one entry a token; fresh noise at
each step."""


def allowed(table: dict[str, Params], name: str) -> dict[str, Params]:
    """Those of `table` that the pipeline `name` takes."""
    return {label: params for label, params in table.items() if name not in REFUSED.get(params.strategy, ())}


def fitting(name: str, params: Params, blocks: int) -> Params:
    """`params` for a pipeline of `blocks` blocks: front and back have to leave one between them."""
    return replace(params, back=0) if getattr(params, "back", 0) and blocks < 3 else params


def ready(pipe: Any, params: Params) -> Params:
    """`params` with a profile of `pipe`, for the cache that needs one.

    What is in the profile is made up, a smooth change of the predictions; its own tests calibrate.
    """
    if not isinstance(params, Planned):
        return params
    with patch(pipe) as handle:
        model = model_of(handle.sites)
    scheduler = pipe.scheduler
    return replace(params, profile=str(made_up(model, type(scheduler).__name__, prediction_of(scheduler))))


@cache
def made_up(model: str, scheduler: str, prediction: str) -> Path:
    """A profile, stored."""
    curve = np.random.default_rng(0).normal(size=(4, 8, 500)) * 0.5 ** np.arange(8)[:, None]
    waves = np.cos(np.pi * np.arange(8)[:, None] * np.arange(STEPS) / STEPS)
    velocities = np.einsum("pkx,kn->pnx", curve, waves)
    grid = Grid(scheduler, prediction, tuple(1 - i / STEPS for i in range(STEPS + 1)))
    tables = Tables(sigmas=np.asarray(grid.times), gram=velocities @ velocities.transpose(0, 2, 1) / 500)
    path = Path(tempfile.mkdtemp()) / "made-up.safetensors"
    Profile(model, Key(grid, (1,), 1, {}), tables).save(path)
    return path


class Log(Feature):
    """Notes of every denoiser call of this rank the branch, the position, the stage and whether anything was skipped."""

    name = "log"
    order = Order.CLOCK

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int, bool]] = []

    def denoiser_out(self, call: Any) -> None:
        if call.elsewhere:
            return
        skipped = call.skipping or call.replaced or call.attention is not call.engine._attention
        self.calls.append((call.branch.name, call.step.position, call.step.stage, skipped))

    def computed(self, branch: str | None = None) -> list[int]:
        """The positions that were computed, of one branch or of the first one seen."""
        branch = branch or self.calls[0][0]
        return sorted({position for name, position, _, skipped in self.calls if name == branch and not skipped})

    @property
    def hits(self) -> int:
        return sum(skipped for *_, skipped in self.calls)
