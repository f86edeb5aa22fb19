"""Pipelines that call a denoiser in another way than text to image: one function and one entry of `VARIANTS` each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers as D
import torch
from tiny import build, call_arguments, kl_vae, noise, rand, run, without_text

STEPS = 8


@dataclass(frozen=True)
class Variant:
    """Attributes:
    pipe: the pipeline.
    call: ``call()`` -> the final latents; the same every time.
    plain: the call without what makes the variant, to show that it acts; None where that is another pipeline.
    branches: denoiser calls of a step by branch, at the step where they are most.
    """

    pipe: Any
    call: Callable[..., torch.Tensor]
    plain: Callable[..., torch.Tensor] | None = None
    branches: int = 1
    denoisers: int = 1


def sibling(cls: type, pipe: Any, **parts: Any) -> Any:
    """A pipeline of class `cls` on the components of `pipe`."""
    made = cls(**{**{name: part for name, part in pipe.components.items() if name in _arguments(cls)}, **parts})
    made.set_progress_bar_config(disable=True)
    return made


def _arguments(cls: type) -> set[str]:
    return set(cls._get_signature_keys(cls)[0])


def awake(module: torch.nn.Module) -> torch.nn.Module:
    """`module` with noise in the parameters that it starts with at zero, so that it does something."""
    with torch.no_grad():
        for parameter in module.parameters():
            if not parameter.any():
                parameter.normal_(0, 0.1, generator=noise(7))
    return module.eval()


def flux_controlnet(**interval: float) -> Variant:
    """The samples are added between blocks; outside the interval they are zero, not absent."""
    base = build("flux")
    torch.manual_seed(1)
    net = D.FluxControlNetModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )
    pipe = sibling(D.FluxControlNetPipeline, base, controlnet=awake(net))
    image = rand(noise(3), 1, 3, 16, 16)

    def call(**over: Any) -> torch.Tensor:
        return run("flux", pipe, STEPS, guided=False, control_image=image, **{**interval, **over})

    return Variant(pipe, call, lambda: call(control_guidance_start=0.0, control_guidance_end=0.0))


def sd3_controlnet() -> Variant:
    base = build("sd3")
    torch.manual_seed(1)
    net = D.SD3ControlNetModel(
        sample_size=16,
        patch_size=1,
        in_channels=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=64,
        out_channels=4,
    )
    pipe = sibling(D.StableDiffusion3ControlNetPipeline, base, controlnet=awake(net))
    image = rand(noise(3), 1, 3, 16, 16)

    def call(**over: Any) -> torch.Tensor:
        torch.manual_seed(5)  # the pipeline encodes the image with noise from the global generator
        return run("sd3", pipe, STEPS, control_image=image, **over)

    return Variant(pipe, call, lambda: call(controlnet_conditioning_scale=0.0))


def skip_layers(*layers: int) -> Variant:
    """Skip-layer guidance: a further branch that leaves blocks out, between two fractions of the schedule."""
    pipe = build("sd3", 4)

    def call(**over: Any) -> torch.Tensor:
        return run("sd3", pipe, STEPS, **over)

    guided = dict(skip_guidance_layers=list(layers), skip_layer_guidance_start=0.0, skip_layer_guidance_stop=0.9)
    return Variant(pipe, lambda: call(**guided), call, branches=2)


def flux_ip_adapter() -> Variant:
    from diffusers.models.embeddings import ImageProjection, MultiIPAdapterImageProjection
    from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor

    pipe = build("flux")
    transformer = pipe.transformer
    torch.manual_seed(1)
    processors = {
        name: FluxIPAdapterAttnProcessor(hidden_size=32, cross_attention_dim=32, num_tokens=(4,), dtype=torch.float32)
        if name.startswith("transformer_blocks")
        else processor
        for name, processor in transformer.attn_processors.items()
    }
    transformer.set_attn_processor(processors)
    projection = ImageProjection(cross_attention_dim=32, image_embed_dim=16, num_image_text_embeds=4)
    transformer.encoder_hid_proj = MultiIPAdapterImageProjection([projection])
    transformer.register_to_config(encoder_hid_dim_type="ip_image_proj")
    images = {f"{sign}ip_adapter_image_embeds": [rand(noise(3), 1, 1, 16)] for sign in ("", "negative_")}

    def call(scale: float = 1.0) -> torch.Tensor:
        pipe.set_ip_adapter_scale(scale)
        return run("flux", pipe, STEPS, **copy.deepcopy(images))

    return Variant(pipe, call, lambda: call(0.0), branches=2)


def flux_image(cls: type, **extra: Any) -> Variant:
    """Image to image, and inpainting: fewer real steps than asked for; two pictures a prompt."""
    pipe = sibling(cls, build("flux"))
    image = torch.rand(1, 3, 16, 16, generator=noise(3))

    def call() -> torch.Tensor:
        return run("flux", pipe, 10, guided=False, image=image, strength=0.8, num_images_per_prompt=2, **extra)

    return Variant(pipe, call)


def flux_inpaint() -> Variant:
    mask = torch.zeros(1, 1, 16, 16)
    mask[..., :8] = 1.0
    return flux_image(D.FluxInpaintPipeline, mask_image=mask)


def two_pictures(name: str, branches: int) -> Variant:
    pipe = build(name)
    return Variant(pipe, lambda: run(name, pipe, STEPS, num_images_per_prompt=2), branches=branches)


def wan_two_experts() -> Variant:
    """A second denoiser takes over at half of the noise."""
    base, other = build("wan"), build("wan", seed=1)
    pipe = sibling(D.WanPipeline, base, transformer_2=other.transformer, boundary_ratio=0.5)
    return Variant(pipe, lambda: run("wan", pipe, 12), lambda: run("wan", base, 12), branches=2, denoisers=2)


def chroma_in_place() -> Variant:
    """Chroma adds ControlNet samples in place to what a block returned; no pipeline passes them, so a call of its does here."""
    pipe = build("chroma")
    samples = [rand(noise(3 + block), 1, 64, 32) for block in range(2)]
    state = {"on": True}

    class CalledWithSamples(type(pipe.transformer)):  # type: ignore[misc]
        """As a pipeline with a ControlNet calls it: a replaced forward would add the samples where no seam sees them."""

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            if state["on"] and self is pipe.transformer:  # copies are called with all that the pipeline gave
                kwargs |= {"controlnet_block_samples": samples, "controlnet_single_block_samples": samples}
            return super().__call__(*args, **kwargs)

    pipe.transformer.__class__ = CalledWithSamples

    def call(on: bool = True) -> torch.Tensor:
        state["on"] = on
        return run("chroma", pipe, STEPS)

    return Variant(pipe, call, lambda: call(False), branches=2)


VARIANTS: dict[str, Callable[[], Variant]] = {
    "flux controlnet": flux_controlnet,
    "flux controlnet, for a while": lambda: flux_controlnet(control_guidance_start=0.25, control_guidance_end=0.7),
    "sd3 controlnet": sd3_controlnet,
    "chroma controlnet, in place": chroma_in_place,
    "sd3 without layer 0": lambda: skip_layers(0),
    "sd3 without layer 1": lambda: skip_layers(1),
    "sd3 without the last layer": lambda: skip_layers(3),
    "flux ip-adapter": flux_ip_adapter,
    "flux img2img": lambda: flux_image(D.FluxImg2ImgPipeline),
    "flux inpaint": flux_inpaint,
    "qwen, two pictures": lambda: two_pictures("qwen", 2),
    "pixart, two pictures": lambda: two_pictures("pixart", 1),
    "wan, two experts": wan_two_experts,
}


def unet_pipeline() -> Variant:
    """Stable Diffusion's UNet: no stack of blocks, so no trunk."""
    torch.manual_seed(0)
    unet = D.UNet2DConditionModel(
        block_out_channels=(4, 8),
        layers_per_block=1,
        sample_size=16,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        norm_num_groups=2,
    )
    scheduler = D.DDIMScheduler(clip_sample=False, steps_offset=1)
    pipe = without_text(
        D.StableDiffusionPipeline,
        unet=unet.eval(),
        vae=kl_vae(4),
        scheduler=scheduler,
        safety_checker=None,
        requires_safety_checker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    given = {name: rand(noise(3), 1, 6, 32) for name in ("prompt_embeds", "negative_prompt_embeds")}
    size = {key: call_arguments("sd3")[key] for key in ("height", "width")}

    def call() -> torch.Tensor:
        return pipe(**given, **size, num_inference_steps=STEPS, generator=noise(), output_type="latent")[0]

    return Variant(pipe, call)
