"""The pipelines that `parallel_scaling.py` draws with: real shapes with random weights, and small ones for a dry run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers as D
import torch


@dataclass(frozen=True)
class Shape:
    """What is drawn: how to build the pipeline, and its call."""

    build: Callable[[dict[str, Any]], Any]
    config: dict[str, Any]
    call: dict[str, Any]
    text: tuple[int, int]
    """Text tokens and their width."""
    branches: int = 1
    """Calls of the denoiser a step."""

    def arguments(self, device: torch.device, dtype: torch.dtype, steps: int) -> dict[str, Any]:
        """The keyword arguments of one call, but for the generator; the same on every rank."""
        tokens, width = self.text
        generator = torch.Generator().manual_seed(1)

        def embeddings() -> torch.Tensor:
            return torch.randn(1, tokens, width, generator=generator).to(device, dtype)

        found = {"prompt_embeds": embeddings(), "output_type": "latent", "num_inference_steps": steps}
        if self.build is flux:
            found["pooled_prompt_embeds"] = torch.randn(1, 768, generator=generator).to(device, dtype)
        else:
            found["negative_prompt_embeds"] = embeddings()
        return {**found, **self.call}


class Pooled(Shape):
    """A shape whose pipeline takes pooled text embeddings for both branches."""

    def arguments(self, device: torch.device, dtype: torch.dtype, steps: int) -> dict[str, Any]:
        width = self.config.get("pooled_projection_dim", 2048)
        pooled = torch.randn(2, width, generator=torch.Generator().manual_seed(2)).to(device, dtype)
        return {
            **super().arguments(device, dtype, steps),
            "pooled_prompt_embeds": pooled[:1],
            "negative_pooled_prompt_embeds": pooled[1:],
        }


def _bare(cls: type, transformer: Any) -> Any:
    """A pipeline of the transformer and a scheduler; text embeddings are passed in and latents taken out."""
    names = cls._get_signature_keys(cls)[0]  # type: ignore[attr-defined]
    parts = dict.fromkeys(names)
    parts.update(transformer=transformer, scheduler=D.FlowMatchEulerDiscreteScheduler())
    pipe = cls(**{name: part for name, part in parts.items() if name in names})
    pipe.set_progress_bar_config(disable=True)
    return pipe


def flux(config: dict[str, Any]) -> Any:
    return _bare(D.FluxPipeline, D.FluxTransformer2DModel(**config, guidance_embeds=True))


def qwen(config: dict[str, Any]) -> Any:
    return _bare(D.QwenImagePipeline, D.QwenImageTransformer2DModel(**config))


def wan(config: dict[str, Any]) -> Any:
    return _bare(D.WanPipeline, D.WanTransformer3DModel(**config))


def sd3(config: dict[str, Any]) -> Any:
    return _bare(D.StableDiffusion3Pipeline, D.SD3Transformer2DModel(**config))


FLUX: dict[str, Any] = {}
QWEN: dict[str, Any] = {}
WAN = {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}
SMALL = {"num_attention_heads": 8, "attention_head_dim": 16, "num_layers": 2}
SMALL_FLUX = {**SMALL, "num_single_layers": 2, "joint_attention_dim": 32, "axes_dims_rope": (4, 6, 6)}
SMALL_QWEN = {**SMALL, "joint_attention_dim": 32, "axes_dims_rope": (4, 6, 6)}

SD35_LARGE = {
    "num_layers": 38, "num_attention_heads": 38, "attention_head_dim": 64, "caption_projection_dim": 2432,
    "pooled_projection_dim": 2048, "pos_embed_max_size": 192, "qk_norm": "rms_norm", "out_channels": 16,
}  # fmt: skip
"""The published configuration of Stable Diffusion 3.5 Large."""
SMALL_SD3 = {
    **SMALL, "caption_projection_dim": 128, "joint_attention_dim": 32, "pooled_projection_dim": 32,
    "pos_embed_max_size": 32, "sample_size": 16,
}  # fmt: skip

SHAPES = {
    "full": {
        "flux-1024": Shape(flux, FLUX, {"height": 1024, "width": 1024}, (512, 4096)),
        "flux-2048": Shape(flux, FLUX, {"height": 2048, "width": 2048}, (512, 4096)),
        "qwen-1024": Shape(qwen, QWEN, {"height": 1024, "width": 1024, "true_cfg_scale": 4.0}, (128, 3584), 2),
        "sd3-1024": Pooled(sd3, SD35_LARGE, {"height": 1024, "width": 1024, "guidance_scale": 4.5}, (154, 4096), 2),
        "wan-480p": Shape(wan, WAN, {"height": 480, "width": 832, "num_frames": 81}, (512, 4096), 2),
    },
    "tiny": {
        "flux-1024": Shape(flux, SMALL_FLUX, {"height": 128, "width": 128}, (16, 32)),
        "flux-2048": Shape(flux, SMALL_FLUX, {"height": 256, "width": 256}, (16, 32)),
        "qwen-1024": Shape(qwen, SMALL_QWEN, {"height": 128, "width": 128, "true_cfg_scale": 4.0}, (16, 32), 2),
        "sd3-1024": Pooled(sd3, SMALL_SD3, {"height": 128, "width": 128, "guidance_scale": 4.5}, (16, 32), 2),
        "wan-480p": Shape(
            wan, {**SMALL, "ffn_dim": 64, "text_dim": 32}, {"height": 64, "width": 64, "num_frames": 5}, (16, 32), 2
        ),
    },
}
