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
            aligned={
                "image_rotary_emb.0": "image@0",
                "image_rotary_emb.1": "text@0",
                "encoder_hidden_states_mask": "text@1",
                "modulate_index": "image@1",
            },
        ),
    ),
    guidance="sequential",
    exit="norm_out",
    trunk_arguments=("controlnet_block_samples",),
)
