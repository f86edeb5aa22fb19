"""Further tiny pipelines, see `tiny`: clips, and HunyuanDiT."""

from __future__ import annotations

from typing import Any

import diffusers as D
import torch
from tiny_parts import LARGE, MEDIUM, OFF, Tiny, flow, kl_vae, on, plain_embed, rand, sized, with_mask, without_text

FRAMES = {**MEDIUM, "num_frames": 9}
LONGER = {**LARGE, "num_frames": 9}


def hunyuan_video(layers: int = 2, **config: Any) -> Any:
    transformer = sized(
        D.HunyuanVideoTransformer3DModel,
        config,
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=10,
        num_layers=layers,
        num_single_layers=layers,
        num_refiner_layers=1,
        patch_size=1,
        patch_size_t=1,
        guidance_embeds=True,
        text_embed_dim=16,
        pooled_projection_dim=8,
        rope_axes_dim=(2, 4, 4),
    )
    vae = D.AutoencoderKLHunyuanVideo(
        latent_channels=4,
        block_out_channels=(8,) * 4,
        layers_per_block=1,
        norm_num_groups=4,
        mid_block_add_attention=False,
    )
    return without_text(D.HunyuanVideoPipeline, transformer=transformer, vae=vae, scheduler=flow(shift=7.0))


def hunyuan_video_embed(g: torch.Generator, batch: int, length: int) -> dict[str, Any]:
    given = with_mask("prompt_embeds", "prompt_attention_mask", 16)(g, batch, length)
    return {**given, "pooled_prompt_embeds": rand(g, batch, 8)}


def cogvideox(layers: int = 2, **config: Any) -> Any:
    transformer = sized(
        D.CogVideoXTransformer3DModel,
        config,
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=4,
        text_embed_dim=16,
        num_layers=layers,
        sample_width=4,
        sample_height=4,
        sample_frames=9,
        patch_size=2,
        temporal_compression_ratio=4,
        max_text_seq_length=6,
        use_rotary_positional_embeddings=True,
    )
    vae = D.AutoencoderKLCogVideoX(
        latent_channels=4,
        block_out_channels=(8,) * 4,
        layers_per_block=1,
        norm_num_groups=2,
    )
    return without_text(
        D.CogVideoXPipeline, transformer=transformer, vae=vae, scheduler=D.CogVideoXDDIMScheduler(clip_sample=False)
    )


def mochi(layers: int = 3, **config: Any) -> Any:
    transformer = sized(
        D.MochiTransformer3DModel,
        config,
        patch_size=2,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=layers,
        pooled_projection_dim=16,
        in_channels=12,
        text_embed_dim=16,
        time_embed_dim=4,
        max_sequence_length=6,
    )
    vae = D.AutoencoderKLMochi(
        encoder_block_out_channels=(32,) * 4,
        decoder_block_out_channels=(32,) * 4,
        layers_per_block=(1,) * 5,
        add_attention_block=(False,) * 5,
    )
    return without_text(D.MochiPipeline, transformer=transformer, vae=vae, scheduler=flow())


def hunyuan_dit(layers: int = 4, **config: Any) -> Any:
    transformer = sized(
        D.HunyuanDiT2DModel,
        config,
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=layers + layers % 2,  # the second half takes what the first half hands over
        attention_head_dim=8,
        num_attention_heads=2,
        cross_attention_dim=8,
        cross_attention_dim_t5=8,
        pooled_projection_dim=4,
        hidden_size=16,
        text_len=6,
        text_len_t5=4,
        activation_fn="gelu-approximate",
    )
    return without_text(
        D.HunyuanDiTPipeline,
        transformer=transformer,
        vae=kl_vae(4, blocks=(4,) * 4, shift=None),
        scheduler=D.DDPMScheduler(),
        safety_checker=None,
        requires_safety_checker=False,
    )


def hunyuan_dit_embed(g: torch.Generator, batch: int, length: int) -> dict[str, Any]:
    return {
        "prompt_embeds": rand(g, batch, 6, 8),
        "prompt_attention_mask": torch.ones(batch, 6, dtype=torch.long),
        "prompt_embeds_2": rand(g, batch, 4, 8),
        "prompt_attention_mask_2": torch.ones(batch, 4, dtype=torch.long),
    }


FURTHER_VIDEO: dict[str, Tiny] = {
    "hunyuan_video": Tiny(
        hunyuan_video, hunyuan_video_embed, FRAMES, {"true_cfg_scale": 3.0}, branches=2, bigger=LONGER
    ),
    "cogvideox": Tiny(cogvideox, plain_embed(16), FRAMES, on(6.0), OFF, bigger=LONGER),
    "mochi": Tiny(
        mochi,
        with_mask("prompt_embeds", "prompt_attention_mask", 16, torch.bool),
        FRAMES,
        on(4.5),
        OFF,
        bigger=LONGER,
    ),
    "hunyuan_dit": Tiny(
        hunyuan_dit,
        hunyuan_dit_embed,
        {**LARGE, "use_resolution_binning": False},
        on(5.0),
        OFF,
        bigger={"height": 128, "width": 128},
    ),
}
"""Builders of this file, ready for `tiny.MORE`."""
