"""`Shape`: every size of one request, worked out once from the pipeline and the options. The only source of sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .errors import RequestError

SPATIAL = ("vae_scale_factor_spatial", "vae_spatial_compression_ratio", "vae_spatial_scale_factor", "vae_scale_factor")
TEMPORAL = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio", "vae_temporal_scale_factor")
"""Under which names diffusers' pipelines keep the factors of their VAE."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of one call. None is what the pipeline decides by itself, or does not have."""

    height: int | None
    """Pixels."""
    width: int | None
    """Pixels."""
    frames: int | None
    """Frames of a clip; None for pictures."""
    multiple: int
    """Height and width are multiples of this many pixels: VAE factor times patch size."""
    frame_multiple: int
    """Frames are one more than a multiple of this."""
    latent: tuple[int, ...] | None
    """Height and width of the latent, with its frames before them for a clip."""
    tokens: int | None
    """Image tokens of the denoiser; None for one without patches."""
    text: int | None
    """Longest prompt, tokens."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def shape_of(pipe: Any, arguments: Mapping[str, Any], defaults: Mapping[str, Any]) -> Shape:
    """The sizes of one call of `pipe`.

    Args:
        pipe: a loaded pipeline.
        arguments: the arguments that the call will be given.
        defaults: the defaults of the call's signature.

    Raises:
        RequestError: the pipeline's VAE or patches cannot take a size; the message has the nearest that fit.
    """

    def argument(name: str) -> Any:
        value = arguments.get(name)
        return value if value is not None else defaults.get(name)

    factor = _factor(pipe, SPATIAL)
    patch, patch_frames = _patch(pipe)
    multiple = max(factor * patch, _processor_multiple(pipe))
    frame_factor = _factor(pipe, TEMPORAL)
    height = argument("height") or _default_pixels(pipe, 0, factor)
    width = argument("width") or _default_pixels(pipe, 1, factor)
    frames = argument("num_frames") if "num_frames" in defaults else None
    for name, value in (("height", height), ("width", width)):
        if arguments.get(name) is not None:
            _check(name, value, multiple, 0, type(pipe).__name__)
    if arguments.get("num_frames") is not None:
        _check("num_frames", frames, frame_factor, 1, type(pipe).__name__)
    latent: tuple[int, ...] | None = None
    tokens = None
    if height and width:
        latent_frames = (frames - 1) // frame_factor + 1 if frames else 1
        latent = (height // factor, width // factor)
        if patch_frames:
            tokens = (height // multiple) * (width // multiple) * max(1, latent_frames // patch_frames)
        if frames:
            latent = (latent_frames, *latent)
    text = argument("max_sequence_length")
    return Shape(
        height=height,
        width=width,
        frames=frames,
        multiple=multiple,
        frame_multiple=frame_factor,
        latent=latent,
        tokens=tokens,
        text=text if isinstance(text, int) else _tokenizer_length(pipe),
    )


def _check(name: str, value: Any, multiple: int, remainder: int, pipeline: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise RequestError(f"{name} {value!r} is not a whole number")
    if value % multiple == remainder % multiple:
        return
    below = (value - remainder) // multiple * multiple + remainder
    fits = " or ".join(str(size) for size in (below, below + multiple) if size > 0)
    rule = f"a multiple of {multiple} pixels" if not remainder else f"1 more than a multiple of {multiple}"
    raise RequestError(
        f"--{name.replace('_', '-')} {value} does not fit {pipeline}, which takes {rule}; nearest: {fits}"
    )


def _factor(pipe: Any, names: tuple[str, ...]) -> int:
    for name in names:
        value = getattr(pipe, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return 1


def _patch(pipe: Any) -> tuple[int, int]:
    """Patch size of the denoiser in latent pixels and latent frames; (1, 0) for one without patches."""
    config = getattr(getattr(pipe, "transformer", None) or getattr(pipe, "transformer_2", None), "config", None)
    if config is None:
        return 1, 0
    patch = getattr(config, "patch_size", None) or getattr(config, "all_patch_size", None) or 1
    frames = getattr(config, "patch_size_t", None) or 1
    if isinstance(patch, (tuple, list)):
        frames = patch[0] if len(patch) == 3 else frames
        patch = patch[-1]
    return int(patch), int(frames)


def _processor_multiple(pipe: Any) -> int:
    """What the pipeline's picture processor rounds sizes to: it knows of packed latents, the denoiser does not."""
    processor = getattr(pipe, "image_processor", None) or getattr(pipe, "video_processor", None)
    return int(getattr(getattr(processor, "config", None), "vae_scale_factor", 1) or 1)


def _default_pixels(pipe: Any, axis: int, factor: int) -> int | None:
    size = getattr(pipe, "default_sample_size", None)
    if size is None:
        denoiser = getattr(pipe, "transformer", None) or getattr(pipe, "unet", None)
        size = getattr(getattr(denoiser, "config", None), "sample_size", None)
    if isinstance(size, (tuple, list)):
        size = size[axis] if len(size) > axis else None
    return size * factor if isinstance(size, int) else None


def _tokenizer_length(pipe: Any) -> int | None:
    length = getattr(getattr(pipe, "tokenizer", None), "model_max_length", None)
    return length if isinstance(length, int) and length < 10**6 else None
