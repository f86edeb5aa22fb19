"""Tiny pipelines with random weights, built offline in well under a second each.

No text encoder: a prompt is a number, and `Tiny.embed` makes embeddings of it. A further pipeline is one more builder
and one more entry of `TINY`, and every contract test runs over it.
"""

from __future__ import annotations

import copy
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


def build(tiny: str | Tiny, layers: int | None = None, seed: int = 0, **config: Any) -> Any:
    """A fresh pipeline, the same weights for the same seed."""
    tiny = ALL[tiny] if isinstance(tiny, str) else tiny
    torch.manual_seed(seed)
    pipe = tiny.build(layers, **config) if layers else tiny.build(**config)
    pipe.set_progress_bar_config(disable=True)
    for component in pipe.components.values():
        if isinstance(component, torch.nn.Module):
            component.eval()
    return pipe


def call_arguments(
    tiny: str | Tiny,
    steps: int = 4,
    seed: int = 0,
    *,
    prompt: int = 0,
    batch: int = 1,
    length: int = 6,
    guided: bool = True,
    **over: Any,
) -> dict[str, Any]:
    """The keyword arguments of one call, made anew: some pipelines write into what they are handed."""
    tiny = ALL[tiny] if isinstance(tiny, str) else tiny
    kwargs = dict(tiny.size, **tiny.embed(noise(1000 + prompt), batch, length))
    guidance = tiny.guided if guided else tiny.unguided
    if guidance is None:
        raise ValueError("this pipeline's guidance cannot be switched off")
    kwargs.update(guidance)
    if guided and tiny.negative:
        negative_length = tiny.negative_length or length
        negative = tiny.embed(noise(5000 + prompt), batch, negative_length)
        kwargs.update({f"negative_{name}": value for name, value in negative.items()})
    kwargs.update(num_inference_steps=steps, generator=noise(seed), output_type="latent", **over)
    return copy.deepcopy(kwargs, {id(value): value for value in over.values()})


def run(tiny: str | Tiny, pipe: Any, steps: int = 4, seed: int = 0, **over: Any) -> torch.Tensor:
    """The final latents of one call, see `call_arguments`."""
    out = pipe(**call_arguments(tiny, steps, seed, **over))
    result = out[0] if isinstance(out, tuple) else next(iter(out.values()))
    return result if isinstance(result, torch.Tensor) else torch.stack(list(result))


# -- parts -------------------------------------------------------------------------------------------------------------


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


# -- builders ----------------------------------------------------------------------------------------------------------


def flux(layers: int = 2, cls: type = D.FluxPipeline, **config: Any) -> Any:
    transformer = sized(
        D.FluxTransformer2DModel,
        config,
        patch_size=1,
        in_channels=4,
        num_layers=layers,
        num_single_layers=layers + 1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
        guidance_embeds=False,
    )
    return without_text(cls, transformer=transformer, vae=kl_vae(1), scheduler=flow())


def flux_dev(layers: int = 2, **config: Any) -> Any:
    return flux(layers, guidance_embeds=True, **config)


def flux_embed(g: torch.Generator, batch: int, length: int) -> dict[str, Any]:
    return {"prompt_embeds": rand(g, batch, length, 32), "pooled_prompt_embeds": rand(g, batch, 32)}


def flux2_transformer(layers: int, **config: Any) -> D.Flux2Transformer2DModel:
    return sized(
        D.Flux2Transformer2DModel,
        config,
        patch_size=1,
        in_channels=4,
        num_layers=layers,
        num_single_layers=layers + 1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=48,
        timestep_guidance_channels=256,
        axes_dims_rope=[4, 4, 4, 4],
    )


def flux2(layers: int = 2, **config: Any) -> Any:
    transformer = flux2_transformer(layers, **config)
    return without_text(D.Flux2Pipeline, transformer=transformer, vae=flux2_vae(), scheduler=flow())


def flux2_klein(layers: int = 2, **config: Any) -> Any:
    transformer = flux2_transformer(layers, **{"guidance_embeds": False, **config})
    return without_text(
        D.Flux2KleinPipeline, transformer=transformer, vae=flux2_vae(), scheduler=flow(), is_distilled=False
    )


def flux2_embed(g: torch.Generator, batch: int, length: int) -> dict[str, Any]:
    return {"prompt_embeds": rand(g, batch, length, 48)}


def qwen(layers: int = 3, **config: Any) -> Any:
    transformer = sized(
        D.QwenImageTransformer2DModel,
        config,
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=layers,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=16,
        guidance_embeds=False,
        axes_dims_rope=(8, 4, 4),
    )
    vae = D.AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 2, 4],
        num_res_blocks=1,
        temperal_downsample=[False, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    return without_text(D.QwenImagePipeline, transformer=transformer, vae=vae, scheduler=flow())


def sd3(layers: int = 3, **config: Any) -> Any:
    transformer = sized(
        D.SD3Transformer2DModel,
        config,
        sample_size=16,
        patch_size=1,
        in_channels=4,
        num_layers=layers,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=32,
        pooled_projection_dim=64,
        out_channels=4,
        qk_norm="rms_norm",
        dual_attention_layers=(0,),
    )
    return without_text(D.StableDiffusion3Pipeline, transformer=transformer, vae=kl_vae(4), scheduler=flow())


def sd3_embed(g: torch.Generator, batch: int, length: int) -> dict[str, Any]:
    return {"prompt_embeds": rand(g, batch, length, 32), "pooled_prompt_embeds": rand(g, batch, 64)}


def zimage(layers: int = 3, **config: Any) -> Any:
    transformer = sized(
        D.ZImageTransformer2DModel,
        config,
        all_patch_size=(2,),
        all_f_patch_size=(1,),
        in_channels=16,
        dim=32,
        n_layers=layers,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=16,
        axes_dims=[8, 4, 4],
        axes_lens=[1024, 64, 64],
    )
    with torch.no_grad():  # the model leaves these uninitialised
        transformer.x_pad_token.fill_(1.0)
        transformer.cap_pad_token.fill_(1.0)
    return without_text(D.ZImagePipeline, transformer=transformer, vae=kl_vae(16, blocks=(4, 4)), scheduler=flow())


def zimage_embed(g: torch.Generator, batch: int, length: int) -> dict[str, Any]:
    return {"prompt_embeds": [rand(g, length, 16) for _ in range(batch)]}


def wan(layers: int = 3, scheduler: Any = None, **config: Any) -> Any:
    transformer = sized(
        D.WanTransformer3DModel,
        config,
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=16,
        out_channels=16,
        text_dim=32,
        freq_dim=32,
        ffn_dim=32,
        num_layers=layers,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )
    vae = D.AutoencoderKLWan(
        base_dim=3, z_dim=16, dim_mult=[1] * 4, num_res_blocks=1, temperal_downsample=[False, True, True]
    )
    return without_text(D.WanPipeline, transformer=transformer, vae=vae, scheduler=scheduler or flow(shift=7.0))


def plain_embed(channels: int) -> Callable[..., dict[str, Any]]:
    return lambda g, batch, length: {"prompt_embeds": rand(g, batch, length, channels)}


def pixart(layers: int = 2, scheduler: Any = None, **config: Any) -> Any:
    transformer = sized(
        D.PixArtTransformer2DModel,
        config,
        sample_size=8,
        num_layers=layers,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_channels=32,
        in_channels=4,
        cross_attention_dim=32,
        out_channels=8,
    )
    return without_text(
        D.PixArtSigmaPipeline,
        transformer=transformer,
        vae=kl_vae(4, shift=None),
        scheduler=scheduler or D.DPMSolverMultistepScheduler(),
    )


def lumina2(layers: int = 2, **config: Any) -> Any:
    transformer = sized(
        D.Lumina2Transformer2DModel,
        config,
        sample_size=16,
        patch_size=2,
        in_channels=4,
        hidden_size=32,
        num_layers=layers,
        num_refiner_layers=1,
        num_attention_heads=4,
        num_kv_heads=2,
        multiple_of=16,
        axes_dim_rope=[4, 2, 2],
        axes_lens=[512, 64, 64],
        cap_feat_dim=8,
    )
    return without_text(D.Lumina2Pipeline, transformer=transformer, vae=kl_vae(4), scheduler=flow())


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


SMALL = {"height": 16, "width": 16}
MEDIUM = {"height": 32, "width": 32}
LARGE = {"height": 64, "width": 64}
CLIP = {"height": 16, "width": 16, "num_frames": 9}
OFF = {"guidance_scale": 1.0}


def on(scale: float) -> dict[str, float]:
    return {"guidance_scale": scale}


TINY: dict[str, Tiny] = {
    "flux": Tiny(flux, flux_embed, SMALL, {"true_cfg_scale": 3.0}, branches=2),
    "flux2_klein": Tiny(flux2_klein, flux2_embed, SMALL, on(4.0), OFF, branches=2, negative_length=5),
    "qwen": Tiny(
        qwen,
        with_mask("prompt_embeds", "prompt_embeds_mask", 16),
        MEDIUM,
        {"true_cfg_scale": 4.0},
        {"true_cfg_scale": 1.0},
        branches=2,
        negative_length=5,
        bigger={"height": 48, "width": 48},
    ),
    "sd3": Tiny(sd3, sd3_embed, SMALL, on(7.0), OFF),
    "zimage": Tiny(zimage, zimage_embed, MEDIUM, on(5.0), on(0.0), bigger=LARGE, negative_length=5),
    "wan": Tiny(wan, plain_embed(32), CLIP, on(5.0), OFF, branches=2, negative_length=5),
    "pixart": Tiny(
        pixart,
        with_mask("prompt_embeds", "prompt_attention_mask", 32),
        {**SMALL, "use_resolution_binning": False, "negative_prompt": None},
        on(4.5),
        OFF,
    ),
    "lumina2": Tiny(
        lumina2,
        with_mask("prompt_embeds", "prompt_attention_mask", 8, torch.bool),
        {"height": 64, "width": 64},
        on(4.0),
        OFF,
        branches=2,
        bigger={"height": 128, "width": 128},
    ),
}
"""The pipelines that every contract is tested on."""

MORE: dict[str, Tiny] = {
    "flux_dev": Tiny(flux_dev, flux_embed, SMALL, on(3.5), None, negative=False),
    "flux2": Tiny(flux2, flux2_embed, SMALL, on(4.0), None, negative=False),
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
"""Pipelines that only the breadth tests run on."""

ALL: dict[str, Tiny] = {**TINY, **MORE}
