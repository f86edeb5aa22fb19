"""Further tiny pipelines, see `tiny`."""

from __future__ import annotations

from typing import Any

import diffusers as D
import torch
from tiny_parts import (
    LARGE,
    MEDIUM,
    OFF,
    SMALL,
    Tiny,
    flow,
    kl_vae,
    on,
    plain_embed,
    rand,
    sized,
    with_mask,
    without_text,
)


def sana(layers: int = 2, **config: Any) -> Any:
    transformer = sized(
        D.SanaTransformer2DModel,
        config,
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=layers,
        num_attention_heads=2,
        attention_head_dim=4,
        num_cross_attention_heads=2,
        cross_attention_head_dim=4,
        cross_attention_dim=8,
        caption_channels=8,
        sample_size=32,
    )
    vae = D.AutoencoderDC(
        in_channels=3,
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=[1, 1],
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
    )
    return without_text(D.SanaPipeline, transformer=transformer, vae=vae, scheduler=flow(shift=7.0))


def hunyuan_image(layers: int = 2, **config: Any) -> Any:
    transformer = sized(
        D.HunyuanImageTransformer2DModel,
        config,
        in_channels=4,
        out_channels=4,
        num_attention_heads=4,
        attention_head_dim=8,
        num_layers=layers,
        num_single_layers=layers,
        num_refiner_layers=1,
        patch_size=(1, 1),
        guidance_embeds=False,
        text_embed_dim=32,
        text_embed_2_dim=32,
        rope_axes_dim=(4, 4),
    )
    vae = D.AutoencoderKLHunyuanImage(
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        block_out_channels=(32, 64),
        layers_per_block=1,
        scaling_factor=0.48,
        spatial_compression_ratio=2,
        sample_size=32,
    )
    pipe = without_text(
        D.HunyuanImagePipeline,
        transformer=transformer,
        vae=vae,
        scheduler=flow(shift=7.0),
        guider=D.AdaptiveProjectedMixGuidance(adaptive_projected_guidance_start_step=2),
        ocr_guider=D.AdaptiveProjectedMixGuidance(adaptive_projected_guidance_start_step=3),
    )
    pipe.default_sample_size = 16
    return pipe


def hunyuan_embed(g: torch.Generator, batch: int, length: int) -> dict[str, Any]:
    valid = torch.ones(batch, length, dtype=torch.long)
    return {
        "prompt_embeds": rand(g, batch, length, 32),
        "prompt_embeds_mask": valid,
        "prompt_embeds_2": rand(g, batch, length, 32),
        "prompt_embeds_mask_2": valid.clone(),
    }


def cogview4(layers: int = 2, **config: Any) -> Any:
    transformer = sized(
        D.CogView4Transformer2DModel,
        config,
        patch_size=2,
        in_channels=4,
        num_layers=layers,
        attention_head_dim=4,
        num_attention_heads=4,
        out_channels=4,
        text_embed_dim=32,
        time_embed_dim=8,
        condition_dim=4,
    )
    scheduler = flow(
        base_shift=0.25, max_shift=0.75, base_image_seq_len=256, use_dynamic_shifting=True, time_shift_type="linear"
    )
    vae = kl_vae(4, blocks=(4, 4))
    return without_text(D.CogView4Pipeline, transformer=transformer, vae=vae, scheduler=scheduler)


def chroma(layers: int = 2, **config: Any) -> Any:
    transformer = sized(
        D.ChromaTransformer2DModel,
        config,
        patch_size=1,
        in_channels=4,
        num_layers=layers,
        num_single_layers=layers,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=[4, 4, 8],
        approximator_hidden_dim=32,
        approximator_layers=1,
        approximator_num_channels=16,
    )
    return without_text(D.ChromaPipeline, transformer=transformer, vae=kl_vae(1), scheduler=flow())


def auraflow(layers: int = 2, **config: Any) -> Any:
    transformer = sized(
        D.AuraFlowTransformer2DModel,
        config,
        sample_size=32,
        patch_size=2,
        in_channels=4,
        num_mmdit_layers=layers,
        num_single_dit_layers=layers,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=32,
        out_channels=4,
        pos_embed_max_size=256,
    )
    return without_text(D.AuraFlowPipeline, transformer=transformer, vae=kl_vae(4, shift=None), scheduler=flow())


def hidream(layers: int = 2, **config: Any) -> Any:
    transformer = sized(
        D.HiDreamImageTransformer2DModel,
        config,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=layers,
        num_single_layers=layers,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_channels=[32, 16],
        text_emb_dim=64,
        num_routed_experts=4,
        num_activated_experts=2,
        axes_dims_rope=(4, 2, 2),
        max_resolution=(32, 32),
        llama_layers=tuple(i % 2 for i in range(2 * layers)),
    )
    pipe = without_text(D.HiDreamImagePipeline, transformer=transformer, vae=kl_vae(4), scheduler=flow())
    pipe.default_sample_size = 16  # sizes are rounded to this area
    return pipe


def hidream_embed(g: torch.Generator, batch: int, length: int) -> dict[str, Any]:
    return {
        "prompt_embeds_t5": rand(g, batch, length, 32),
        "prompt_embeds_llama3": rand(g, 2, batch, length, 16),
        "pooled_prompt_embeds": rand(g, batch, 64),
    }


def ltx(layers: int = 2, **config: Any) -> Any:
    transformer = sized(
        D.LTXVideoTransformer3DModel,
        config,
        in_channels=8,
        out_channels=8,
        patch_size=1,
        patch_size_t=1,
        num_attention_heads=4,
        attention_head_dim=8,
        cross_attention_dim=32,
        num_layers=layers,
        caption_channels=32,
    )
    vae = D.AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=(8,) * 4,
        decoder_block_out_channels=(8,) * 4,
        layers_per_block=(1,) * 5,
        decoder_layers_per_block=(1,) * 5,
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        decoder_inject_noise=(False,) * 5,
        upsample_residual=(False,) * 4,
        upsample_factor=(1,) * 4,
        patch_size=1,
        patch_size_t=1,
    )
    return without_text(D.LTXPipeline, transformer=transformer, vae=vae, scheduler=flow())


FURTHER: dict[str, Tiny] = {
    "sana": Tiny(
        sana,
        with_mask("prompt_embeds", "prompt_attention_mask", 8),
        {**MEDIUM, "use_resolution_binning": False, "negative_prompt": None},
        on(4.5),
        OFF,
        bigger=LARGE,
    ),
    "hunyuan_image": Tiny(hunyuan_image, hunyuan_embed, MEDIUM, {}, None, branches=2, bigger=LARGE),
    "cogview4": Tiny(cogview4, plain_embed(32), MEDIUM, on(5.0), OFF, branches=2, bigger=LARGE),
    "chroma": Tiny(
        chroma,
        with_mask("prompt_embeds", "prompt_attention_mask", 32, torch.bool),
        SMALL,
        on(5.0),
        OFF,
        branches=2,
    ),
    "auraflow": Tiny(auraflow, with_mask("prompt_embeds", "prompt_attention_mask", 32), SMALL, on(3.5), OFF),
    "hidream": Tiny(hidream, hidream_embed, SMALL, on(5.0), OFF),
    "ltx": Tiny(
        ltx,
        with_mask("prompt_embeds", "prompt_attention_mask", 32),
        {**MEDIUM, "num_frames": 9},
        on(3.0),
        OFF,
        bigger=LARGE,
    ),
}
"""Builders of this file, ready for `tiny.MORE`."""
