"""Write `ChituBench/result.md`, and the headline table of the README, from the stored results: ``python ChituBench/scripts/report.py``.

Every number in the tables and in the text around them is read from `ChituBench/results/`; a test writes both again and
finds no difference. After a new run, put its files there and run this.
"""

# ruff: noqa: E501 - the lines of the page are as they are on the page

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import report_caches
import report_gpus
import report_planned
import report_readme
import report_shapes

from chitu_diffusion.bench import parallel_tables, tables
from chitu_diffusion.bench.results import summary

BENCH = Path(__file__).resolve().parent.parent
PAGE = BENCH / "result.md"
README = BENCH.parent / "README.md"


def page() -> str:
    """The whole page."""
    parts = [
        INTRODUCTION,
        flexcache(),
        report_planned.section(_read("planned_ablation") if _there("planned_ablation") else None),
        overhead(_read("overhead")),
        skipped_steps(),
        attention(_read("attention")),
        report_shapes.section(_read("model_shapes") if _there("model_shapes") else None),
        *map(report_gpus.section, _several_gpus()),
        parallel_bench(),
        EMBEDDED,
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def readme() -> str:
    """The README with its headline table."""
    table = report_readme.headline(report_readme.stored(BENCH / "results", _read))
    return report_readme.filled(README.read_text(encoding="utf-8"), table)


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")
    README.write_text(readme(), encoding="utf-8")
    if _there("model_shapes"):
        report_shapes.plot(_read("model_shapes"), BENCH / "plots" / "model_shapes.png")
    for run in _several_gpus():
        report_gpus.plot(run, BENCH / "plots" / f"parallel_x{run['ranks']}.png")
    print(PAGE, README, sep="\n")


def _several_gpus() -> list[dict[str, Any]]:
    """A run for each number of ranks of which there is a file."""
    return [_read(path.stem) for path in sorted((BENCH / "results").glob("parallel_x*.json"))]


def _there(name: str) -> bool:
    return (BENCH / "results" / f"{name}.json").is_file()


def _read(name: str) -> Any:
    return json.loads((BENCH / "results" / f"{name}.json").read_text(encoding="utf-8"))


INTRODUCTION = """# Results

Written by `python ChituBench/scripts/report.py` from the files in [results](results/overhead.json); do not edit by hand. What is not
listed was not measured; what did not pay is in [negative results](../docs/negative-results.md)."""

EMBEDDED = """## The embedded model

See [demo_model](demo_model/README.md): recipe, bars and what was measured."""

FLUX = (
    "{machine}, bfloat16, FLUX.1-dev transformer shape (19 + 38 blocks, 24 heads of 128) with random weights, 4,096 image and 512\n"
    "text tokens, batch 1; {versions}. Settings alternate within one process; numbers are medians."
)


# -- caches ------------------------------------------------------------------------------------------------------------


def flexcache() -> str:
    """Nothing where no run is stored."""
    stored = BENCH / "results" / "flexcache.json"
    if not stored.is_file():
        return ""
    parts = ["## Caches", READING, RUNS]
    parts += [f"![{text}](plots/{name})" for name, text in PLOTS.items() if (BENCH / "plots" / name).is_file()]
    found = summary([stored])
    pairs = report_caches.pairs(found)
    return "\n\n".join([*parts, *([SAME, pairs] if pairs else []), tables.section(found)])


RUNS = """On each machine seconds are of one run, with the other makers' cases beside ours. Pictures, calls and FLOPs of ours on the GPU were made anew when the planned cache had
changed: all others came out as they had been to the last digit, so only its rows have new ones, on the CPU too. `cubic` and five cases on the GPU (`taylorseer` with `warmup=2` or `damping=0.25`,
`easycache` with `max_consecutive`, at 28 steps `teacache` with 0.15) are of this later run as a whole, on a slower machine of the same kind: compare their speed-ups, not their seconds."""
SAME = """Strategies that other makers have too; of several families of one maker, the best at that ratio of those that were measured:"""
READING = """`chitu bench flexcache` ([data](results/flexcache.json)). Each case is compared with the baseline of the same prompt, seed, noise, dtype
and scheduler. *FLOPs ÷*: the baseline's over the case's, counted where modules really ran, the same way for every maker. *Denoise,
speed-up*: median, least and most over calls that took turns with the baseline, one picture each. *Calls*: calls in which every block
ran, of all calls, for each branch of guidance. *PSNR*: mean over pictures with its 95 % bootstrap interval over prompts; equal pictures
count as 100 dB. *Held*: the most that our cache kept; what other makers' keep is seen in *peak* only, on a GPU. Bold: no other case
is both faster and nearer. The first table of each run reads every family at the same counted FLOPs off the straight lines between its cases; in
italics past its first or last case, by up to 13 %. *Fewer steps* and *coarser grid* cost nothing and need no cache: a cache that is not above them does not pay."""
PLOTS = {
    "flexcache_tradeoff.png": "speed-up of denoising and PSNR of every case on a GPU, a curve for each family",
    "flexcache_tradeoff_2.png": "the same on a CPU, with fewer cases",
    "flexcache_sheet.png": "the first prompts drawn on a CPU by the baseline and by each family at about the same compute",
}


# -- hooks -------------------------------------------------------------------------------------------------------------

ROWS = {
    "unhooked": "unhooked",
    "plain patch": "plain `patch(pipe)`",
    "static, every step computed": "`static`, every step computed (residuals kept)",
    "every seam watched": "a feature that watches all four seams",
}


def overhead(data: dict[str, Any]) -> str:
    """What the hooks cost."""
    eager, compiled = data["eager"], data["compiled"]
    rows = [
        f"| {label} | {eager[key]['ms']:.1f} | {_ratio(eager[key])} | {compiled[key]['ms']:.1f} | {_ratio(compiled[key])} |"
        for key, label in ROWS.items()
    ]
    skipped = f"| a skipped step | {eager['skipped step']['ms']:.2f} | | {compiled['skipped step']['ms']:.2f} | |"
    where = FLUX.format(
        machine=f"One {data['machine']}", versions=f"torch {data['torch']}, diffusers {data['diffusers']}"
    )
    return f"""## What the hooks cost

{where}

`{data["command"]}` ([data](results/overhead.json), commit {data["commit"]})

| milliseconds a step | eager | ratio | compiled blocks | ratio |
|---|---|---|---|---|
{chr(10).join(rows)}
{skipped}

{eager["unhooked"]["samples"]} steps each; single steps spread from {_low(eager):.0f} to {_high(eager):.0f} ms eager and from \
{_low(compiled):.0f} to {_high(compiled):.0f} ms compiled, so differences under about one per
cent are none that can be seen. `patch(...)` with a cache and a kernel took {data["patch_ms"]["median"]:.1f} ms on the loaded pipeline, \
{data["patch_ms"]["first"]:.1f} ms the
first time; a check for diffusers' own caches that came later walks the modules once more.
The Python of the block seam costs {data["block_us"]["static"]:.1f} µs a block call with `static` and {data["block_us"]["watcher"]:.1f} µs \
with the feature that watches everything."""


def _ratio(numbers: dict[str, Any]) -> str:
    return "1" if numbers["ratio"] == 1 else f"{numbers['ratio']:.3f}"


def _low(mode: dict[str, Any]) -> float:
    return min(numbers["ms_low"] for numbers in mode.values() if "ms_low" in numbers)


def _high(mode: dict[str, Any]) -> float:
    return max(numbers["ms_high"] for numbers in mode.values() if "ms_high" in numbers)


# -- skipped steps -----------------------------------------------------------------------------------------------------


def skipped_steps() -> str:
    """Nothing where no run is stored."""
    stored = BENCH / "results" / "skipped_step.json"
    return skipped_step(_read("skipped_step")) if stored.is_file() else ""


def skipped_step(data: dict[str, Any]) -> str:
    """What a skipped step costs with each strategy, and what deciding does."""
    versions, machine = data["versions"], data["machine"]
    modes = [mode for mode in ("eager", "compiled") if mode in data]
    rows = []
    for name in data[modes[0]]:
        found = [data[mode][name] for mode in modes]
        cells = [f"{row['beyond_ms']:.2f}" + (f" + {row['front_ms']:.2f}" if row["front_ms"] else "") for row in found]
        cells += [f"{row['decision_ms']:.3f}" for row in found]
        rows.append(f"| `{name}` | {' | '.join(cells)} | {found[0]['reads']} | {found[0]['bytes_held'] / 2**20:.1f} |")
    names = {"eager": "eager", "compiled": "compiled blocks"}
    heads = [f"skipped step, ms, {names[mode]}" for mode in modes] + [f"decision, ms, {names[mode]}" for mode in modes]
    where = FLUX.format(
        machine=f"One {machine.get('gpu', machine.get('cpu'))}",
        versions=f"torch {versions['torch']}, diffusers {versions['diffusers']}",
    )
    bars = data["bars"]
    return f"""## What a skipped step costs

{where}

`python ChituBench/scripts/{data["command"]}` ([data](results/skipped_step.json), commit {data["commit"]})

| strategy | {" | ".join(heads)} | reads of the device | held, MiB |
|{"---|" * (len(heads) + 3)}
{chr(10).join(rows)}

Asked for: a skipped step within {bars["beyond_ms"]} ms, deciding within {bars["decision_ms"]} ms and {bars["reads"]} read of the device, none \
where the schedule is known before; {_over(data, modes)}.
`fbcache` computes the front block in every step, that is its method: *a + b* are the step beyond that block, and the block.{_waiting(data[modes[0]])}"""


def _waiting(rows: dict[str, Any]) -> str:
    if not any("waiting" in name for name in rows):
        return ""
    return """ *waiting* decides
nothing, and waits for the device where others do: the host then launches the model's own embedders and head with nothing queued behind which to hide,
which is what a skipped step costs at least wherever a decision reads something of that step's trunk."""


def _over(data: dict[str, Any], modes: list[str]) -> str:
    over = [
        f"`{name}` {mode} ({key} {row[key]:.3g})"
        for mode in modes
        for name, row in data[mode].items()
        for key, bar in data["bars"].items()
        if row[key] > bar
    ]
    return f"over that: {', '.join(over)}" if over else "all of them are"


# -- attention kernels -------------------------------------------------------------------------------------------------

KERNELS = {
    "fa3": "`fa3` (fa3-fwd {fa3-fwd})",
    "sdpa_cudnn": "`sdpa_cudnn`",
    "diffusers:native": "diffusers `native`",
    "diffusers:_native_cudnn": "diffusers `_native_cudnn`",
    "sage": "`sage` {sageattention} (lossy)",
    "sdpa_flash": "`sdpa_flash`",
    "sdpa_efficient": "`sdpa_efficient`",
}
STEPS = {
    "auto": '`attention="auto"`',
    "fa3": '`attention="fa3"`',
    "stock": "stock (diffusers `native`)",
    "sdpa_cudnn": '`attention="sdpa_cudnn"`',
    "diffusers' _native_cudnn": 'diffusers `set_attention_backend("_native_cudnn")`',
    "diffusers' _native_flash": 'diffusers `set_attention_backend("_native_flash")`',
    "sdpa_flash": '`attention="sdpa_flash"`',
}
BLOCK = 64
"""Keys that sage takes at a time."""


def attention(data: dict[str, Any]) -> str:
    """Kernels at the shapes of well-known models, and FLUX steps with each of them."""
    versions, shapes = data["versions"], data["shapes"]
    names = f"torch {versions['torch']} (CUDA {versions['cuda']}, cuDNN {_cudnn(versions['cudnn'])}), diffusers {versions['diffusers']}"
    rows = [_kernel_row(label.format_map(versions), kernel, shapes) for kernel, label in KERNELS.items()]
    command = f"python ChituBench/scripts/{data['command']}"
    even = next(r for r in data["grid"] if (r["dtype"], r["D"], r["S"]) == ("bfloat16", 64, 4096))["kernels"]
    ragged = next(r for r in shapes if r["D"] == 64)
    return f"""## Attention kernels

One {data["machine"]["gpu"]}, bfloat16, no masks; {names}; medians of calls that take turns in one process.

`{command}` ([data](results/attention.json), commit {data["commit"]})

![TFLOP/s of each kernel at four shapes](plots/attention_kernels.png)

| TFLOP/s | {" | ".join(row["shape"] for row in shapes)} |
|{"---|" * (len(shapes) + 1)}
| batch × heads × tokens × head dim | {" | ".join(f"{r['B']}×{r['H']}×{r['S']}×{r['D']}" for r in shapes)} |
{chr(10).join(rows)}

`sage` {versions["sageattention"]} masks no scores behind the last key: with a number of keys that is no multiple of {BLOCK} the rest of the last
block counts as keys with score 0. Chitu refuses such lengths since; the speeds in brackets are of that wrong sum. Not measured: \
{_unusable(data)}.

cuDNN and FlashAttention-3 are even at {even["fa3"]["tflops"]:.0f} and {even["sdpa_cudnn"]["tflops"]:.0f} TFLOP/s with 4,096 tokens of head dim 64, and \
{ragged["kernels"]["fa3"]["tflops"] / ragged["kernels"]["sdpa_cudnn"]["tflops"]:.2f} times apart at {ragged["shape"]}'s {ragged["S"]:,}: a table
made from round lengths alone would not show that, so the table of `auto` counts the named shapes too.

![milliseconds of a FLUX step with each kernel](plots/attention_steps.png)

{_steps(data["steps"])}

FLUX.1-dev shape as above. Eager steps are bound by the launches of the host, so a faster kernel shows little there. `auto` and `fa3`
run the same kernel: what is between them is the noise of this run."""


def _cudnn(number: str) -> str:
    """91900 is 9.19.0."""
    return f"{int(number) // 10000}.{int(number) // 100 % 100}.{int(number) % 100}"


def _kernel_row(label: str, kernel: str, shapes: list[dict[str, Any]]) -> str:
    cells = []
    for row in shapes:
        value = row["kernels"][kernel]["tflops"]
        best = value == max(numbers["tflops"] for numbers in row["kernels"].values())
        wrong = kernel == "sage" and row["S"] % BLOCK
        cells.append(f"**{value:.0f}**" if best else f"({value:.0f})" if wrong else f"{value:.0f}")
    return f"| {label} | {' | '.join(cells)} |"


def _unusable(data: dict[str, Any]) -> str:
    own = {name: reason for name, reason in data["unusable"].items() if not name.startswith("diffusers:")}
    return "; ".join(f"`{name}`, {reason.removesuffix(': not measured')}" for name, reason in own.items())


def _steps(modes: list[dict[str, Any]]) -> str:
    names = {"eager": "eager", "compiled": "compiled blocks"}
    head = " | ".join(f"{names[mode['mode']]} | ratio to stock" for mode in modes)
    lines = [f"| FLUX step, ms | {head} |", "|" + "---|" * (1 + 2 * len(modes))]
    for key, label in STEPS.items():
        cells = []
        for mode in modes:
            found = mode["candidates"][key]
            best = found["median_ms"] == min(c["median_ms"] for c in mode["candidates"].values())
            value, ratio = f"{found['median_ms']:.1f}", found["ratio_to_stock"]
            cells += [f"**{value}**" if best else value, "1" if ratio == 1 else f"{ratio:.3f}"]
        if key == "auto":
            label += f" ({_chosen(modes[0])})"
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _chosen(mode: dict[str, Any]) -> str:
    return ", ".join(f"`{kernel}` for {call}" for call, kernel in mode["chosen"]["auto"]["chosen"].items())


# -- processes ---------------------------------------------------------------------------------------------------------


def parallel_bench() -> str:
    """What `chitu bench parallel` measured; nothing where no run is stored."""
    if not _there("parallel_bench"):
        return ""
    parts = ["## One process and several", RANKS]
    parts += [f"![{text}](plots/{name})" for name, text in RANK_PLOTS.items() if (BENCH / "plots" / name).is_file()]
    return "\n\n".join([*parts, parallel_tables.section(summary([BENCH / "results" / "parallel_bench.json"]))])


RANKS = """`chitu bench parallel` ([data](results/parallel_bench.json)). Each mode first had to give the picture of one process (*off by*: 2-norm of the
last latents, relative, the worst rank); then all took turns. *Speed-up*: of a step, over the fastest single process of the same run, which on
a CPU has all cores unless its name says otherwise, while each of several processes has its share of them. *Exchange*: the share of denoising
between the start and the end of some exchange, waiting for the others included, in a profiled call; on a GPU when nothing else ran."""
RANK_PLOTS = {
    "parallel_bench_scaling.png": "speed-up of a step by number of processes, with the ideal line",
    "parallel_bench_stages.png": "seconds of each stage of one picture, for every mode",
}


if __name__ == "__main__":
    main()
