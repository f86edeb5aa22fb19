"""Attention kernels at the shapes of well-known models, and FLUX.1-dev steps with each of them.

    python ChituBench/scripts/attention.py --write --budget-seconds 150 --output ChituBench/results/attention
    python ChituBench/scripts/attention.py --plot ChituBench/results/attention/attention.json --output ChituBench/plots
    python ChituBench/scripts/attention.py --size tiny --output /tmp/attention      # a dry run, on the CPU in seconds

What is measured, and how, is in `chitu_diffusion/bench/`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from chitu_diffusion.bench.attention import bench_attention, fill_table
from chitu_diffusion.bench.attention_plot import plot
from chitu_diffusion.bench.attention_steps import measure_steps
from chitu_diffusion.bench.timing import Budget, store


def say(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure attention kernels and FLUX steps, and store the numbers.")
    parser.add_argument("--size", choices=("full", "tiny"), default="full")
    parser.add_argument("--write", action="store_true", help="measure the grid and write the table of attention=auto")
    parser.add_argument("--output", type=Path, default=Path("outputs/attention"), help="folder for the results")
    parser.add_argument("--budget-seconds", type=float, default=float("inf"), help="leave out what does not fit")
    parser.add_argument("--rounds", type=int, default=4, help="calls of each candidate that steps are taken from")
    parser.add_argument("--plot", type=Path, help="draw the pictures of this stored result, and measure nothing")
    options = parser.parse_args()
    if options.plot is not None:
        for path in plot(options.plot, options.output):
            say(str(path))
        return
    tiny = options.size == "tiny"
    budget = Budget(options.budget_seconds)
    first, last = torch.bfloat16, torch.float16
    result = bench_attention(
        options.output,
        write=options.write,
        quick=options.rounds < 4,
        tiny=tiny,
        budget=budget,
        dtypes=(first,),
        tell=say,
    )

    def keep() -> None:
        store(options.output / "attention.json", result)

    with torch.no_grad():
        measure_steps(tiny=tiny, rounds=options.rounds, budget=budget, result=result, keep=keep, tell=say)
        if options.write and budget.allows("grid in float16", 0 if tiny else 25):
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            fill_table(result, device, last, options.output, tiny, say)
    keep()
    for path in plot(options.output / "attention.json", options.output):
        say(str(path))


if __name__ == "__main__":
    main()
