"""How a target is called once, small: by the file's own ``call(pipe)``, or by a prompt as ``chitu verify`` does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chitu_diffusion.runtime import DiffusionTask

from .errors import IntakeError, told
from .skeleton import hushed
from .target import Target

Run = Callable[[], Any]


def runner(target: Target, task: DiffusionTask) -> Run | None:
    """One call of the target's pipeline, the same every time; None if there are no weights to call it with.

    Raises:
        RequestError: an option does not fit the pipeline.
    """
    if target.call is not None:
        call, pipe = target.call, target.pipe
        return lambda: _named(target, lambda: call(pipe))
    if not target.has_weights:
        return None
    encoders = [part for name, part in target.pipe.components.items() if name.startswith("text_encoder")]
    if not encoders or any(part is None for part in encoders):
        return None  # it takes something else than a prompt, and only its maker knows what
    return by_prompt(target, task)


def by_prompt(target: Target, task: DiffusionTask) -> Run:
    """A call for the first prompt of `task`, with an array as its result."""
    from chitu_diffusion.runtime.call import plan_call, read_pictures
    from chitu_diffusion.runtime.generator import call

    plan = plan_call(target.pipe, task, read_pictures(task))
    plan.arguments["output_type"] = "np"
    return lambda: _named(target, lambda: call(target.pipe, task.prompts[0], task.seed, plan))


def load_weights(target: Target, task: DiffusionTask) -> Target:
    """The target with its weights, for a folder or an id; others are returned as they are.

    Raises:
        LoadError: they are not there or not whole, or there is no such device.
    """
    import dataclasses

    from chitu_diffusion.runtime.loading import load_pipeline, model_source, pick_device, pick_dtype

    if target.kind not in ("folder", "id"):
        return target
    device = pick_device(task.device, task.require_gpu)
    source = model_source(str(target.folder) if target.kind == "folder" else target.word)
    pipe = load_pipeline(source, dtype=pick_dtype(task.dtype, device), device=device)
    return dataclasses.replace(target, pipe=pipe, loaded=True)


def _named(target: Target, run: Run) -> Any:
    """`run`, with what a call of the user's raises told in one sentence."""
    from chitu_diffusion.runtime.generator import quiet
    from chitu_hooks import ChituError

    try:
        with quiet(target.pipe), hushed():
            return run()
    except ChituError:
        raise
    except Exception as error:
        what = f"call(pipe) of {target.word!r}" if target.call is not None else f"a small call of {target.word!r}"
        raise IntakeError(f"{what} raises {told(error)}") from error
