"""``chitu verify``: does the hooked pipeline compute what the unhooked one computes?"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options as o
from .group import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from chitu_diffusion.evaluation.parity import Recording, Row
    from chitu_diffusion.runtime import DiffusionTask
    from chitu_hooks import Sites

PROMPT = "a red apple on a blue background"
STEPS = 4


def verify(
    model_: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="The same as --model.", show_default=False)
    ] = None,
    model: o.Model = None,
    hook_map: o.HookMapFile = None,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    require_gpu: o.RequireGpu = False,
    prompt: o.Prompt = None,
    negative_prompt: o.NegativePrompt = None,
    steps: o.Steps = None,
    guidance: o.Guidance = None,
    height: o.Height = None,
    width: o.Width = None,
    seed: o.Seed = 0,
    image: o.Image = None,
    mask: o.Mask = None,
    num_frames: o.NumFrames = None,
    set_: o.Set = None,
    attention: o.Attention = None,
    cache: o.Cache = None,
    cache_arg: o.CacheArg = None,
) -> None:
    """Run a pipeline unhooked and hooked, and compare every site: 0 is expected everywhere.

    The hooked run has all four seams in place and nothing on, so not one bit may differ; neither may it after the
    hooks are taken off. With --attention or --cache, a further run says what those declare and what was measured. The
    exit code is 1 where something that is exact was not. --steps is 4 if left out; all outputs of that many steps are
    kept in memory.
    """
    if model_ is not None and model is not None:
        raise UserError("MODEL and --model are the same thing; give one of them")
    cache_args, arguments = o.pairs("--cache-arg", cache_arg), o.scalars("--set", set_)
    o.need_diffusers()
    from chitu_diffusion.runtime import DiffusionTask

    task = DiffusionTask(
        prompts=(prompt if prompt is not None else PROMPT,), negative_prompt=negative_prompt,
        steps=steps if steps is not None else STEPS, guidance=guidance, height=height, width=width, seed=seed,
        image=image, mask=mask, num_frames=num_frames, arguments=arguments,
        model=model_ if model_ is not None else model, hook_map=hook_map, dtype=dtype, device=device,
        require_gpu=require_gpu, attention=attention, cache=cache, cache_args=cache_args,
    )  # fmt: skip
    if not check(task):
        raise typer.Exit(1)


def check(given: DiffusionTask) -> bool:
    """Load, run four times, compare and print.

    Returns:
        Whether everything that is exact was.
    """
    from rich.console import Console

    from chitu_diffusion.evaluation.parity import compare, make_probe, record
    from chitu_diffusion.runtime.generator import Generator, choose, hook, quiet, with_defaults

    from .show import showing_notes

    console = Console()
    task = with_defaults(given)
    chosen = choose(task)
    with showing_notes(), Generator.load(task) as generator:
        pipe, sites = generator.pipe, generator.handle.sites
        run = _runner(generator, task)
        generator.close()
        with quiet(pipe):
            reference = record(sites, run)
            probe = make_probe(sites)
            with hook(pipe, {"hook_map": chosen["hook_map"], "features": (probe,)}):
                hooked = compare(sites, run, reference)
            undone = compare(sites, run, reference)
            idle = probe.idle(sites)
            good = show_exact(console, sites, hooked, undone, probe.seams(), idle)
            if task.attention is not None or task.cache is not None:
                good = show_features(console, pipe, chosen, run, reference) and good
    return good


def _runner(generator: Any, task: DiffusionTask) -> Callable[[], Any]:
    """One call of the pipeline, the same every time, with its result as an array."""
    from chitu_diffusion.runtime.generator import call

    plan = generator.plan(task)
    plan.arguments["output_type"] = "np"
    return lambda: call(generator.pipe, task.prompts[0], task.seed, plan)[0]


def show_exact(
    console: Console, sites: Sites, hooked: list[Row], undone: list[Row], seams: dict[str, int], idle: list[str]
) -> bool:
    """The table of sites, and the verdict on the hooked run and the one after undo."""
    from .show import table

    made = table("site", "kind", "calls", "largest difference", numbers=("calls", "largest difference"))
    for row in hooked:
        calls = str(row.calls) if row.calls == row.reference_calls else f"{row.calls} of {row.reference_calls}"
        made.add_row(row.site, row.kind, calls, f"{row.largest:.3g}", style=None if row.equal else "red")
    console.print(made)
    _say(console, "calls at the seams: " + ", ".join(f"{seam} {calls}" for seam, calls in seams.items()))
    for site in sites.attention:
        if not site.reachable:
            _say(console, f"out of reach of the attention seam: {site.path}")
    moved = [row for row in hooked if not row.equal]
    stayed = [row for row in undone if not row.equal]
    if idle:
        _say(console, f"FAILED: the {' and '.join(idle)} seam was put in place and not called")
    if moved:
        far = f"{len(moved)} of {len(hooked)} sites differ, the largest by {_largest(moved):.3g}"
        _say(console, f"FAILED: hooked with nothing on, {far}")
    if stayed:
        far = f"{len(stayed)} sites differ from the first run, the largest by {_largest(stayed):.3g}"
        _say(console, f"FAILED: after undo {far}")
    if moved and stayed:
        _say(console, "(a pipeline that does not repeat itself even without hooks on this device looks like this too)")
    if not (idle or moved or stayed):
        _say(
            console,
            f"hooked with nothing on: all {len(hooked)} sites equal, largest difference 0; after undo: equal again",
        )
    return not (idle or moved or stayed)


def _say(console: Console, text: str) -> None:
    """A sentence, not broken at the edge of a narrow terminal."""
    console.print(text, soft_wrap=True, markup=False, highlight=False)


def _largest(rows: list[Row]) -> float:
    return max(row.largest for row in rows)


def show_features(
    console: Console, pipe: Any, chosen: dict[str, Any], run: Callable[[], Any], reference: Recording
) -> bool:
    """What the features declare, and what they did to the output.

    Returns:
        False if all of them are exact and the output differs.
    """
    from chitu_diffusion.evaluation.parity import largest_difference, tensors_of
    from chitu_diffusion.evaluation.pictures import psnr
    from chitu_diffusion.runtime.generator import hook

    from .show import table

    with hook(pipe, chosen) as handle:
        result = [tensor.cpu() for tensor in tensors_of(run())]
        report = handle.report()
    made = table("feature", "declares", "did")
    for feature in report.features:
        detail = ", ".join(f"{k} {v}" for k, v in feature.items() if k in ("kernel", "layers", "computed", "hits"))
        made.add_row(feature["name"], feature["exactness"], detail)
    console.print()
    console.print(made)
    difference = largest_difference(result, reference.result)
    likeness = psnr(result[0], reference.result[0])
    measured = (
        f"largest difference {difference:.3g} of 1, PSNR {likeness:.2f} dB" if difference else "not a bit differs"
    )
    _say(console, f"measured against the unhooked run: {measured}")
    exact = all(feature["exactness"] == "exact" for feature in report.features)
    if exact and difference:
        _say(console, "FAILED: everything on is declared exact, and the output differs")
    return not (exact and difference)
