"""Tiny pipelines with random weights, built offline in well under a second each.

No text encoder: a prompt is a number, and `Tiny.embed` makes embeddings of it. A further pipeline is one more builder
and one more entry of `TINY`, and every contract test runs over it.
"""

from __future__ import annotations

import copy
from typing import Any

import diffusers as D
import torch
from tiny_more import FURTHER
from tiny_parts import (
    CLIP,
    LARGE,
    MEDIUM,
    OFF,
    SMALL,
    Tiny,
    flow,
    flux2_vae,
    kl_vae,
    noise,
    on,
    plain_embed,
    rand,
    sized,
    with_mask,
    without_text,
)
from tiny_video import FURTHER_VIDEO


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
    **FURTHER,
    **FURTHER_VIDEO,
}
"""Pipelines that only the breadth tests run on."""

ALL: dict[str, Tiny] = {**TINY, **MORE}
