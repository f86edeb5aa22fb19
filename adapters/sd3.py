"""Stable Diffusion 3 and 3.5; the last block returns no text."""

from chitu_hooks import HookMap, Stack

HOOK_MAP = HookMap(
    name="sd3",
    pipelines=(
        "StableDiffusion3Pipeline",
        "StableDiffusion3Img2ImgPipeline",
        "StableDiffusion3InpaintPipeline",
        "StableDiffusion3ControlNetPipeline",
        "StableDiffusion3ControlNetInpaintingPipeline",
        "StableDiffusion3PAGPipeline",
        "StableDiffusion3PAGImg2ImgPipeline",
    ),
    stacks=(
        Stack(
            "transformer_blocks",
            streams={"image": "hidden_states", "text": "encoder_hidden_states"},
            returns=("text", "image"),
            order=("image", "text"),
            aligned={},
        ),
    ),
    guidance="batched",
    exit="norm_out",
    trunk_arguments=("block_controlnet_hidden_states",),
)
