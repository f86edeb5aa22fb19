"""Further variants, see `variants`: UNets, a second model for the unconditional branch, and what is done to weights.

The contracts are not tested over these; the matrix is, and the tests that name one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import accelerate
import diffusers as D
import torch
from tiny import build, noise, rand, run, without_text
from tiny_parts import flow, kl_vae
from variants import STEPS, Variant, sibling, unet_pipeline


def sdxl() -> Variant:
    """Stable Diffusion XL's UNet, with transformers of two layers inside its blocks."""
    torch.manual_seed(0)
    unet = D.UNet2DConditionModel(
        block_out_channels=(8, 16),
        layers_per_block=1,
        sample_size=16,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        transformer_layers_per_block=(1, 2),
        projection_class_embeddings_input_dim=64,
        cross_attention_dim=32,
        norm_num_groups=2,
    )
    pipe = without_text(
        D.StableDiffusionXLPipeline, unet=unet.eval(), vae=kl_vae(4, shift=None), scheduler=D.EulerDiscreteScheduler()
    )
    pipe.set_progress_bar_config(disable=True)
    given = {f"{sign}prompt_embeds": rand(noise(3 + len(sign)), 1, 6, 32) for sign in ("", "negative_")}
    pooled = {f"{sign}pooled_prompt_embeds": rand(noise(9 + len(sign)), 1, 16) for sign in ("", "negative_")}

    def call() -> torch.Tensor:
        return pipe(
            **given,
            **pooled,
            height=16,
            width=16,
            num_inference_steps=STEPS,
            generator=noise(),
            output_type="latent",
        )[0]

    return Variant(pipe, call)


class TwoModels(D.DiffusionPipeline):
    """Guidance as Ideogram 4 does it: the unconditional branch has a model of its own."""

    def __init__(self, transformer: Any, unconditional_transformer: Any, scheduler: Any) -> None:
        super().__init__()
        self.register_modules(
            transformer=transformer, unconditional_transformer=unconditional_transformer, scheduler=scheduler
        )

    @torch.no_grad()
    def __call__(self, num_inference_steps: int = STEPS) -> tuple[torch.Tensor]:
        latents, words = rand(noise(1), 1, 16, 4, 4, 4), rand(noise(2), 1, 6, 32)
        self.scheduler.set_timesteps(num_inference_steps)
        for t in self.scheduler.timesteps:
            known = self.transformer(latents, t[None], words, return_dict=False)[0]
            free = self.unconditional_transformer(latents, t[None], torch.zeros_like(words), return_dict=False)[0]
            latents = self.scheduler.step(free + 3.0 * (known - free), t, latents, return_dict=False)[0]
        return (latents,)


def two_models() -> Variant:
    pipe = TwoModels(build("wan").transformer, build("wan", seed=1).transformer, flow())
    return Variant(pipe, lambda: pipe()[0], branches=1, denoisers=2)


def flux3_modular() -> Variant:
    """FLUX.3 has a modular pipeline only; here without its text encoder and its VAE."""
    from diffusers.modular_pipelines.flux3.modular_blocks_flux3 import Flux3CoreDenoiseStep

    torch.manual_seed(0)
    transformer = D.Flux3Transformer2DModel(
        in_channels=8,
        cond_in_channels=8,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        timestep_channels=32,
        axes_dims_rope=(4, 4, 4, 4),
    )
    pipe = Flux3CoreDenoiseStep().init_pipeline()
    pipe.update_components(transformer=transformer.eval(), scheduler=flow())
    pipe.set_progress_bar_config(disable=True)
    prompts = {f"{sign}prompt_embeds": rand(noise(3 + len(sign)), 1, 6, 32) for sign in ("", "negative_")}

    def call() -> torch.Tensor:
        return pipe(**prompts, height=64, width=64, num_inference_steps=STEPS, generator=noise(), output="latents")

    return Variant(pipe, call, branches=2)


def perturbed(name: str, cls: type, layer: str, **given: Any) -> Callable[[], Variant]:
    """Perturbed attention guidance: a third part of the batch, and in one block a processor of two attention calls."""

    def make() -> Variant:
        pipe = sibling(cls, build(name), pag_applied_layers=layer)

        def call(scale: float = 3.0) -> torch.Tensor:
            return run(name, pipe, STEPS, pag_scale=scale, **given)

        return Variant(pipe, call, lambda: call(0.0))

    return make


PERTURBED = {
    "sd3": (D.StableDiffusion3PAGPipeline, "blocks.1"),
    "pixart": (D.PixArtSigmaPAGPipeline, "blocks.1"),
    "sana": (D.SanaPAGPipeline, "transformer_blocks.1"),
    "hunyuan_dit": (D.HunyuanDiTPAGPipeline, "blocks.1"),
}


def device_map() -> Variant:
    """Loaded from a folder with ``device_map``: the only strategy that diffusers has, on the one device there is."""
    made = build("flux")
    with tempfile.TemporaryDirectory() as folder:
        made.save_pretrained(folder)
        absent = {name: None for name, part in made.components.items() if part is None}
        pipe = type(made).from_pretrained(folder, device_map="balanced", **absent)
    pipe.set_progress_bar_config(disable=True)
    return Variant(pipe, lambda: run("flux", pipe, STEPS))


def changed(name: str, change: Callable[[Any], None]) -> Callable[[], Variant]:
    """A tiny pipeline after `change` was done to it."""

    def make() -> Variant:
        pipe = build(name)
        change(pipe)
        return Variant(pipe, lambda: run(name, pipe, STEPS))

    return make


def lora(pipe: Any) -> None:
    import peft

    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["to_q", "to_k", "to_v", "to_out.0"])
    pipe.transformer.add_adapter(config, adapter_name="one")


def model_offload(pipe: Any) -> None:
    pipe.enable_model_cpu_offload(device="cpu")


def dispatched(pipe: Any) -> None:
    """A transformer in parts, each brought to its device when it is called, as ``device_map`` of a model does."""
    own = [name for name, _ in pipe.transformer.named_parameters(recurse=False)]
    parts = dict.fromkeys([*own, *(name for name, _ in pipe.transformer.named_children())], "cpu")
    accelerate.dispatch_model(pipe.transformer, parts, main_device="cpu", force_hooks=True)


def group_offload(pipe: Any) -> None:
    pipe.transformer.enable_group_offload(
        onload_device=torch.device("cpu"),
        offload_device=torch.device("cpu"),
        offload_type="block_level",
        num_blocks_per_group=1,
    )


def int8_weights(pipe: Any) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(pipe.transformer, Int8WeightOnlyConfig())


def fused(pipe: Any) -> None:
    pipe.transformer.fuse_qkv_projections()


CHANGES = {"LoRA": lora, "model offload": model_offload, "group offload": group_offload, "dispatched": dispatched}
CHANGED = {
    "LoRA": ("flux", "wan"),
    "model offload": ("flux", "wan"),
    "group offload": ("flux", "wan"),
    "dispatched": ("flux", "wan"),
}
INT8_WEIGHTS = ("flux, int8 weights", "wan, int8 weights")
FUSED = ("flux", "qwen", "auraflow", "pixart", "cogvideox", "hunyuan_dit")

FURTHER_VARIANTS: dict[str, Callable[[], Variant]] = {
    "two models, one unconditional": two_models,
    **{f"{name}, {change}": changed(name, CHANGES[change]) for change, names in CHANGED.items() for name in names},
    "flux, device map": device_map,
    **{f"{name}, perturbed attention": perturbed(name, *PERTURBED[name]) for name in PERTURBED},
    "sd3, perturbed attention, img2img": perturbed(
        "sd3", D.StableDiffusion3PAGImg2ImgPipeline, "blocks.1", image=torch.zeros(1, 3, 16, 16), strength=1.0
    ),
    **{f"{name}, fused projections": changed(name, fused) for name in FUSED},
    **{name: changed(name.partition(",")[0], int8_weights) for name in INT8_WEIGHTS},
    "flux 3, modular": flux3_modular,
    "stable diffusion 1.5": unet_pipeline,
    "stable diffusion xl": sdxl,
}
