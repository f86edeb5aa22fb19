"""What the builders of tiny pipelines share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import diffusers as D
import torch


@dataclass(frozen=True)
class Tiny:
    """One tiny pipeline.

    Attributes:
        build: ``build(layers=…, **transformer_config)``; `layers` is the length of every trunk stack.
        embed: ``embed(generator, batch, length)`` -> the call's arguments that stand for a prompt.
        size: the call's arguments for a small picture or clip.
        guided, unguided: arguments that switch guidance on and off; None if it cannot be switched.
        branches: denoiser calls a step with guidance on.
        bigger: `size` of a larger picture.
        negative: whether a prompt has a negative one when guided.
        negative_length: token count of the negative prompt: 5 where the pipeline allows another one than the prompt's.
    """

    build: Callable[..., Any]
    embed: Callable[[torch.Generator, int, int], dict[str, Any]]
    size: dict[str, Any]
    guided: dict[str, Any] = field(default_factory=dict)
    unguided: dict[str, Any] | None = field(default_factory=dict)
    branches: int = 1
    bigger: dict[str, Any] = field(default_factory=lambda: {"height": 32, "width": 32})
    negative: bool = True
    negative_length: int | None = None


def noise(seed: int = 0) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


def flow(**config: Any) -> D.FlowMatchEulerDiscreteScheduler:
    return D.FlowMatchEulerDiscreteScheduler(**config)


def kl_vae(latent: int, *, blocks: tuple[int, ...] = (4,), shift: float | None = 0.06) -> D.AutoencoderKL:
    return D.AutoencoderKL(
        sample_size=32,
        block_out_channels=blocks,
        layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * len(blocks),
        up_block_types=("UpDecoderBlock2D",) * len(blocks),
        latent_channels=latent,
        norm_num_groups=1,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=shift,
        scaling_factor=1.5,
    )


def flux2_vae() -> D.AutoencoderKLFlux2:
    return D.AutoencoderKLFlux2(
        sample_size=32,
        down_block_types=("DownEncoderBlock2D",),
        up_block_types=("UpDecoderBlock2D",),
        block_out_channels=(4,),
        layers_per_block=1,
        latent_channels=1,
        norm_num_groups=1,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def sized(cls: type, config: dict[str, Any], **sizes: Any) -> Any:
    """A transformer of class `cls` of these `sizes`, where `config` does not say otherwise."""
    return cls(**{**sizes, **config})


def without_text(cls: type, **parts: Any) -> Any:
    """A pipeline of class `cls` with `parts` and no text encoders."""
    names = [
        name
        for name in inspect.signature(cls.__init__).parameters
        if name.startswith(("text_encoder", "tokenizer", "image_encoder", "feature_extractor", "transformer_2"))
    ]
    return cls(**{**dict.fromkeys(names), **parts})


def rand(g: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=g)


def with_mask(name: str, mask: str, channels: int, dtype: torch.dtype = torch.long) -> Callable[..., dict[str, Any]]:
    """`embed` of one tensor and its mask; the last token is padding."""

    def embed(g: torch.Generator, batch: int, length: int) -> dict[str, Any]:
        valid = torch.ones(batch, length, dtype=dtype)
        valid[:, -1] = 0
        return {name: rand(g, batch, length, channels), mask: valid}

    return embed


def plain_embed(channels: int) -> Callable[..., dict[str, Any]]:
    return lambda g, batch, length: {"prompt_embeds": rand(g, batch, length, channels)}


def on(scale: float) -> dict[str, float]:
    return {"guidance_scale": scale}


SMALL = {"height": 16, "width": 16}
MEDIUM = {"height": 32, "width": 32}
LARGE = {"height": 64, "width": 64}
CLIP = {"height": 16, "width": 16, "num_frames": 9}
OFF = {"guidance_scale": 1.0}
