"""Qwen-Image, text to image, img2img, inpainting, ControlNet and Edit."""

from chitu_hooks import HookMap, Stack

HOOK_MAP = HookMap(
    name="qwen_image",
    pipelines=(
        "QwenImagePipeline",
        "QwenImageImg2ImgPipeline",
        "QwenImageInpaintPipeline",
        "QwenImageControlNetPipeline",
        "QwenImageControlNetInpaintPipeline",
        "QwenImageEditPipeline",
        "QwenImageEditInpaintPipeline",
        "QwenImageEditPlusPipeline",
    ),
    stacks=(
        Stack(
            "transformer_blocks",
            streams={"image": "hidden_states", "text": "encoder_hidden_states"},
            returns=("text", "image"),
        ),
    ),
    guidance="sequential",
)
