"""What a skipped step costs, and what deciding costs, for each strategy, eager and compiled.

Runs the FLUX.1-dev transformer shape with random weights (speed does not depend on the weights), 1024x1024, batch 1::

    python ChituBench/scripts/skipped_step.py --output ChituBench/results/skipped_step.json
    python ChituBench/scripts/skipped_step.py --size tiny        # a dry run on the CPU

*skipped*: milliseconds between the ends of two scheduler steps of which the later one was skipped. `fbcache` computes the front
block in every step, that is its method: *front* is what the block takes inside the skipped steps, and *beyond* the rest, which
is what a bar can be set for; for the others the two are 0 and all of it. *decision*: milliseconds that the strategy's own
decision takes on the host, waiting for the device included, with the queue of the device empty before it. *reads*: how often a
decision waits for the device. *waiting* is the static schedule with a wait for the device where the others decide, and no
decision: what is left of a step for any strategy that has to read, since the host then launches the model's embedders and its
head with nothing queued behind which to hide. Strategies that compute a large part of every step, `blockdance`, `pab` and
`cubic`, have no skipped steps and are not here.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from overhead import SIZES, Bench, build, stage

from chitu_diffusion import EasyCache, FBCache, MagCache, MeanCache, Planned, Static, TaylorSeer, TeaCache, patch
from chitu_diffusion.bench.timing import Stopwatch, circumstances, store
from chitu_diffusion.flexcache import Params, Strategy
from chitu_diffusion.flexcache.planning.profile import LEAST
from chitu_hooks import BlockInputs, Call, Feature, Order, Streams
from chitu_hooks.sites import BlockSite

STEPS = 12
BARS = {"beyond_ms": 1.5, "decision_ms": 0.3, "reads": 1}
"""What is asked of every strategy on one H200; reads are 0 where the schedule is known before."""
ADAPTIVE = ("fbcache", "easycache", "teacache")
"""Strategies that have to read a distance; no other may."""
WAITING = "static hold, waiting"

STRATEGIES: dict[str, Params] = {
    "static hold": Static(steps=(0, 1)),
    WAITING: Static(steps=(0, 1)),
    "static linear": Static(steps=(0, 1), forecast="linear"),
    "fbcache": FBCache(threshold=1e9),
    "fbcache order 1": FBCache(threshold=1e9, order=1, warmup=2),
    "magcache": MagCache(ratios=(1.0,) * (STEPS - 1), retention=0.0, max_consecutive=None),
    "easycache": EasyCache(threshold=1e9, warmup=2, cooldown=0),
    "teacache": TeaCache(coefficients=(1.0, 0.0), threshold=1e9, cooldown=0),
    "meancache": MeanCache(steps=(0, 1)),
    "meancache window 2": MeanCache(steps=(0, 1, 2), window=2),
    "taylorseer order 1": TaylorSeer(interval=STEPS, ramp=False, order=1),
    "taylorseer order 2": TaylorSeer(interval=STEPS, ramp=False, order=2),
    "taylorseer feature": TaylorSeer(interval=STEPS, ramp=False, order=1, of="feature"),
}
"""Parameters that skip from the third or fourth step on."""


class Skips(Feature):
    """Notes which steps skipped."""

    name = "skips"
    order = Order.CLOCK

    def __init__(self) -> None:
        self.steps: list[bool] = []

    def denoiser_out(self, call: Call) -> None:
        self.steps.append(call.skipping or call.replaced)


class Waits(Feature):
    """Waits for the device where the trunk begins."""

    name = "waits"
    order = Order.CLOCK

    def trunk_in(self, call: Call, streams: Streams) -> None:
        streams["image"].view(-1)[0].item()


class Front(Feature):
    """Times the first block of the trunk, in skipped steps."""

    name = "front"
    order = Order.CLOCK

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._watch = Stopwatch(device)
        self._skipped: list[bool] = []

    def block_in(self, call: Call, block: BlockSite, inputs: BlockInputs) -> None:
        if block.index == 0 and block.stack.number == 0:
            self._watch.mark()

    def block_out(self, call: Call, block: BlockSite, outputs: Streams) -> None:
        if block.index == 0 and block.stack.number == 0:
            self._watch.mark()

    def denoiser_out(self, call: Call) -> None:
        self._skipped.append(call.skipping)

    def milliseconds(self) -> list[float]:
        """Of the block in each skipped step."""
        return [lap for lap, skipped in zip(self._watch.laps()[::2], self._skipped, strict=True) if skipped]


class Decisions:
    """Times the decisions of one strategy, and counts how often they wait for the device."""

    def __init__(self, strategy: Strategy, cuda: bool) -> None:
        self.times: list[float] = []
        self.reads: list[int] = []
        self._read = 0
        self._synchronize: Callable[[], None] = torch.cuda.synchronize if cuda else lambda: None
        self._decide, reduce = strategy.decide, strategy.reduce
        strategy.decide = self.decide  # type: ignore[method-assign]
        strategy.reduce = lambda sums: self._count(reduce(sums))

    def _count(self, sums: torch.Tensor) -> torch.Tensor:
        self._read += 1
        return sums

    def decide(self, call: Call) -> bool:
        self._synchronize()
        self._read, start = 0, time.perf_counter()
        decision = self._decide(call)
        if decision:
            self.times.append(1e3 * (time.perf_counter() - start))
            self.reads.append(self._read)
        return decision


def measure(bench: Bench, params: Params, rounds: int, more: tuple[type[Feature], ...] = ()) -> dict[str, Any]:
    """One strategy: skipped steps and decisions, each over `rounds` generations after one that warms up.

    Args:
        more: features that are on in skipped steps besides.
    """
    skipped: list[float] = []
    computed: list[float] = []
    for number in range(rounds + 1):
        skips = Skips()
        with patch(bench.pipe, cache=params, features=(skips, *(feature() for feature in more))) as handle:
            times = bench.milliseconds()
            held = handle.report().bytes_held
        if number:
            for time_ms, hit in zip(times, skips.steps[1:], strict=True):
                (skipped if hit else computed).append(time_ms)
    front = front_block(bench, params, rounds) if isinstance(params, FBCache) else [0.0]
    decisions: list[float] = []
    reads: list[int] = []
    for number in range(rounds + 1):
        with patch(bench.pipe, cache=params) as handle:
            watch = Decisions(_strategy(handle), bench.cuda)
            bench.milliseconds()
        if number:
            decisions += watch.times
            reads += watch.reads
    if not skipped or not decisions:
        raise RuntimeError(f"{params} skipped nothing, so there is nothing to time")
    return {
        "skipped_ms": statistics.median(skipped),
        "front_ms": statistics.median(front),
        "beyond_ms": statistics.median(skipped) - statistics.median(front),
        "skipped_ms_low": min(skipped),
        "skipped_ms_high": max(skipped),
        "computed_ms": statistics.median(computed) if computed else None,
        "decision_ms": statistics.median(decisions),
        "decision_ms_high": max(decisions),
        "reads": max(reads),
        "samples": len(skipped),
        "bytes_held": held,
    }


def front_block(bench: Bench, params: Params, rounds: int) -> list[float]:
    """Milliseconds of the front block inside skipped steps, over `rounds` generations after one that warms up."""
    found: list[float] = []
    for number in range(rounds + 1):
        front = Front(bench.device)
        with patch(bench.pipe, cache=params, features=(front,)):
            bench.milliseconds()
        if number:
            found += front.milliseconds()
    return found


def over_the_bars(name: str, row: dict[str, Any]) -> list[str]:
    """What of `row` is more than is asked for."""
    bars = BARS if name.startswith(ADAPTIVE) else {**BARS, "reads": 0}
    return [key for key, bar in bars.items() if row[key] > bar]


def planned(bench: Bench, folder: str) -> Planned:
    """A plan of a quarter of the steps, from a profile of this pipeline in `folder`."""
    profile = Path(folder) / "profile.safetensors"
    calls = [{**bench.call, "generator": torch.Generator().manual_seed(number)} for number in range(LEAST)]
    with patch(bench.pipe) as handle:
        handle.calibrate(calls, planned=profile)
    return Planned(profile=profile, budget=1 / 4)


def _strategy(handle: Any) -> Strategy:
    return next(feature for feature in handle.features if isinstance(feature, Strategy))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="flux-dev")
    parser.add_argument("--rounds", type=int, default=3, help="counted generations; one that warms up comes first")
    parser.add_argument("--no-compile", action="store_true", help="leave out the compiled half")
    parser.add_argument("--output", type=Path, help="where to write the JSON")
    options = parser.parse_args()
    size, device = SIZES[options.size], "cuda" if options.size == "flux-dev" else "cpu"

    with stage("build"):
        pipe = build(size, device)
    bench = Bench(pipe, size, STEPS)
    with tempfile.TemporaryDirectory() as folder:
        with stage("calibrate"):
            strategies = {**STRATEGIES, "planned": planned(bench, folder)}
        run(bench, strategies, options)


def run(bench: Bench, strategies: dict[str, Params], options: argparse.Namespace) -> None:
    """Measure, print and store one mode after the other."""
    result: dict[str, Any] = {
        "what": "skipped steps, FLUX.1-dev shape, random weights" if bench.cuda else "dry run",
        **circumstances(bench.device),
        "steps": STEPS,
        "bars": BARS,
    }
    for mode in ("eager",) if options.no_compile else ("eager", "compiled"):
        if mode == "compiled":
            with stage("compile"):
                backend = {} if bench.cuda else {"backend": "eager"}
                bench.pipe.transformer.compile_repeated_blocks(fullgraph=True, **backend)
                bench.milliseconds()
        result[mode] = {}
        for name, params in strategies.items():
            more = (Waits,) if name == WAITING else ()
            row = result[mode][name] = measure(bench, params, options.rounds, more)
            late = over_the_bars(name, row)
            print(
                f"  {mode:9s} {name:20s} skipped {row['skipped_ms']:.3f} ms, beyond the front block {row['beyond_ms']:.3f} ms, "
                f"decision {row['decision_ms']:.3f} ms, reads {row['reads']}"
                + (f"; over the bar: {', '.join(late)}" if late else ""),
                flush=True,
            )
        if options.output:
            store(options.output, result)


if __name__ == "__main__":
    main()
