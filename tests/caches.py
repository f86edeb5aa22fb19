"""Parameters of every strategy for the tests of caches, and a feature that logs what a cache did."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from chitu_diffusion import (
    PAB,
    BlockDance,
    Cubic,
    EasyCache,
    FBCache,
    MagCache,
    MeanCache,
    Static,
    TaylorSeer,
    TeaCache,
)
from chitu_diffusion.flexcache import Params
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
    "cubic": Cubic(warmup=2, static=0.4, medium=0.7, static_interval=5, medium_interval=2, region=2),
    "taylorseer": TaylorSeer(order=2, interval=3),
    "taylorseer feature": TaylorSeer(order=1, interval=3, on="feature"),
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
    "cubic": Cubic(medium=0.0, warmup=1),
    "cubic often": Cubic(static_interval=1, warmup=1),
    "taylorseer": TaylorSeer(interval=1, order=2),
    "taylorseer feature": TaylorSeer(interval=1, on="feature"),
    "warmup": FBCache(threshold=50.0, warmup=STEPS),
}
"""Parameters that never skip."""


def one_each(table: dict[str, Params]) -> dict[str, Params]:
    """One entry of `table` for each strategy: what is left out are other schedules of the same machinery."""
    return {label: params for label, params in table.items() if label == params.strategy}


REFUSED = {"cubic": ("sana", "hidream", "mochi", "hunyuan_dit")}
"""Strategy -> pipelines that it refuses: no map says which arguments of their blocks have one entry a token."""


def allowed(table: dict[str, Params], name: str) -> dict[str, Params]:
    """Those of `table` that the pipeline `name` takes."""
    return {label: params for label, params in table.items() if name not in REFUSED.get(params.strategy, ())}


def fitting(name: str, params: Params, blocks: int) -> Params:
    """`params` for a pipeline of `blocks` blocks: front and back have to leave one between them."""
    return replace(params, back=0) if getattr(params, "back", 0) and blocks < 3 else params


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
