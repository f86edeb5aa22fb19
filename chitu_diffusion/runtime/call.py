"""What one task means for one pipeline: the arguments of its call, each option placed by name or refused by name."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chitu_hooks.errors import nearest

from .errors import RequestError
from .shape import Shape, shape_of
from .task import DiffusionTask, option

ARGUMENTS: dict[str, tuple[str, ...]] = {
    "negative_prompt": ("negative_prompt",),
    "steps": ("num_inference_steps",),
    "guidance": ("true_cfg_scale", "guidance_scale"),
    "height": ("height",),
    "width": ("width",),
    "num_images": ("num_images_per_prompt", "num_videos_per_prompt"),
    "num_frames": ("num_frames",),
    "image": ("image",),
    "mask": ("mask_image", "mask"),
}
"""Field of a task -> the names under which pipelines take it; the first that a pipeline has is used."""

OWN = {"prompt": "--prompt", "generator": "--seed"}
"""Arguments that the run fills in itself, and the option for each."""

NOT_PLAIN = re.compile(
    r"embeds|latents|callback|generator|^image|_image$|scheduler$|guider|^output_type$|^return_dict$|_kwargs$"
)
"""Names of arguments that take tensors or functions, or decide on the form of the result."""


@dataclass(frozen=True, kw_only=True)
class CallPlan:
    """The arguments of every call of one task, the prompt and the random generator left out."""

    arguments: dict[str, Any]
    shape: Shape
    placed: dict[str, str]
    """Field of the task -> argument that it became."""
    filled_in: dict[str, Any]
    """What nobody asked for and the call is given all the same, so that what was asked for acts."""
    fps: float | None
    """Frames per second of a clip; None for pictures."""

    def to_json(self) -> dict[str, Any]:
        plain = {name: _plain(value) for name, value in self.arguments.items()}
        return {
            "arguments": plain,
            "placed": self.placed,
            "filled_in": self.filled_in,
            "fps": self.fps,
            "shape": self.shape.to_json(),
        }


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return repr(value)


def plan_call(pipe: Any, task: DiffusionTask, pictures: Mapping[str, Any]) -> CallPlan:
    """Place every option of `task` among the arguments of `pipe`.

    Args:
        pipe: a loaded pipeline.
        task: the request, with defaults filled in.
        pictures: the task's input pictures by field name, see `read_pictures`.

    Raises:
        RequestError: an option that the pipeline has no argument for, or that would have no effect; the message names
            the option and the nearest arguments.
    """
    parameters = inspect.signature(type(pipe).__call__).parameters
    defaults = {name: p.default for name, p in parameters.items() if name != "self" and p.kind is not p.VAR_KEYWORD}
    known = {name: None if value is inspect.Parameter.empty else value for name, value in defaults.items()}
    placed: dict[str, str] = {}
    arguments: dict[str, Any] = {}
    for field, names in ARGUMENTS.items():
        value = pictures.get(field, getattr(task, field))
        if value is not None:
            placed[field] = _argument_for(pipe, field, names, known)
            arguments[placed[field]] = value
    for name, value in task.arguments.items():
        arguments[name] = _checked(pipe, name, value, known)
    filled_in = _guidance(pipe, task, arguments, known, placed.get("guidance"))
    if "output_type" in known:
        filled_in["output_type"] = "pil"
    fps = _frame_rate(pipe, task, arguments, known)
    _check_inputs(pipe, arguments, defaults)
    arguments |= filled_in
    return CallPlan(
        arguments=arguments, shape=shape_of(pipe, arguments, known), placed=placed, filled_in=filled_in, fps=fps
    )


def _argument_for(pipe: Any, field: str, names: tuple[str, ...], known: Mapping[str, Any]) -> str:
    for name in names:
        if name in known:
            return name
    raise RequestError(
        f"{option(field)} has no meaning for {type(pipe).__name__}, which has no "
        f"{' or '.join(names)}{nearest(names[0], _plain_names(known))}"
    )


def _plain_names(known: Mapping[str, Any]) -> set[str]:
    """The arguments that can be given from a shell."""
    return {name for name in known if not NOT_PLAIN.search(name)}


def _checked(pipe: Any, name: str, value: Any, known: Mapping[str, Any]) -> Any:
    """The value of ``--set name=value``, if the pipeline can be given it so."""
    options = OWN | {next((n for n in names if n in known), ""): option(field) for field, names in ARGUMENTS.items()}
    if name in options:
        raise RequestError(f"--set {name}: use {options[name]} for it")
    if name not in known:
        near = nearest(name, _plain_names(known) - set(options))
        raise RequestError(f"--set {name}: {type(pipe).__name__} has no such argument{near}")
    if NOT_PLAIN.search(name):
        raise RequestError(f"--set {name}: this argument is no plain value and cannot be given from a shell")
    default = known[name]
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(default, bool):
        fits, kind = isinstance(value, bool), "true or false"
    elif isinstance(default, int):
        fits, kind = number and float(value).is_integer(), "a whole number"
    elif isinstance(default, float):
        fits, kind = number, "a number"
    else:
        fits, kind = True, ""
    if not fits:
        raise RequestError(f"--set {name}={value}: {type(pipe).__name__} takes {kind} there, such as {default}")
    return value


def _guidance(
    pipe: Any, task: DiffusionTask, arguments: Mapping[str, Any], known: Mapping[str, Any], used: str | None
) -> dict[str, Any]:
    """What has to be added so that guidance and negative prompt act; refuses those that cannot."""
    name = used or next((n for n in ARGUMENTS["guidance"] if n in known), None)
    scale = arguments.get(name, known.get(name)) if name else None
    config = getattr(pipe, "config", {})
    if getattr(config, "is_distilled", False) and task.guidance is not None and task.guidance > 1:
        raise RequestError(
            f"--guidance {task.guidance:g} has no effect: this {type(pipe).__name__} is distilled and has none"
        )
    if task.negative_prompt and name and not (isinstance(scale, (int, float)) and scale > 1):
        raise RequestError(
            f"--negative-prompt has no effect at {name} {scale}; give --guidance above 1 with it, or leave it out"
        )
    denoiser = getattr(getattr(pipe, "transformer", None), "config", {})
    if (
        "guidance_scale" in task.arguments
        and getattr(denoiser, "guidance_embeds", None) is False
        and name == "true_cfg_scale"
    ):
        raise RequestError(
            f"--set guidance_scale has no effect: this {type(pipe).__name__} has no guidance embedding; use --guidance"
        )
    wants = name == "true_cfg_scale" and used is not None and scale is not None and scale > 1
    return {"negative_prompt": ""} if wants and arguments.get("negative_prompt") is None else {}


def _frame_rate(pipe: Any, task: DiffusionTask, arguments: dict[str, Any], known: Mapping[str, Any]) -> float | None:
    """Frames per second of the clip, told to the pipeline too where it takes one."""
    name = next((n for n in ("frame_rate", "fps") if n in known), None)
    if "num_frames" not in known and name is None:
        if task.fps is not None:
            raise RequestError(f"--fps has no meaning for {type(pipe).__name__}, which makes pictures and no clips")
        return None
    given = arguments.get(name) if name else None
    if task.fps is not None and given is not None:
        raise RequestError(f"--fps and --set {name} are the same thing here; give one of them")
    if task.fps is not None and name is not None:
        arguments[name] = int(task.fps) if float(task.fps).is_integer() else task.fps
    return float(task.fps or given or (known[name] if name else None) or 16)


def _check_inputs(pipe: Any, arguments: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Refuse before the call what a pipeline of this kind cannot do without."""
    name = type(pipe).__name__
    needs_mask = "Inpaint" in name
    needs_image = needs_mask or any(word in name for word in ("Img2Img", "ImageToVideo", "Edit"))
    needs_image = needs_image or defaults.get("image") is inspect.Parameter.empty
    if needs_image and "image" in defaults and "image" not in arguments:
        raise RequestError(f"{name} starts from a picture; give one with --image")
    if "mask_image" in defaults and "mask_image" not in arguments and needs_mask:
        raise RequestError(f"{name} needs to know what to draw anew; give a mask with --mask")


def read_pictures(task: DiffusionTask) -> dict[str, Any]:
    """The task's input pictures, by field name: `image` in RGB and `mask` in grey.

    Raises:
        RequestError: a file is not there or is not a picture.
    """
    from PIL import Image

    pictures = {}
    for field, mode in (("image", "RGB"), ("mask", "L")):
        path = getattr(task, field)
        if path is None:
            continue
        if not Path(path).is_file():
            raise RequestError(f"{option(field)} {path!r}: no such file")
        try:
            with Image.open(path) as picture:
                pictures[field] = picture.convert(mode)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            raise RequestError(f"{option(field)} {path!r} is not a picture that can be read") from None
    return pictures
