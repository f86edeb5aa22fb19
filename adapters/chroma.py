"""Chroma1, text to image, img2img and inpainting."""

from chitu_hooks import HookMap, Stack

ALIGNED = {"image_rotary_emb.0": "joint@0", "image_rotary_emb.1": "joint@0"}

HOOK_MAP = HookMap(
    name="chroma",
    pipelines=("ChromaPipeline", "ChromaImg2ImgPipeline", "ChromaInpaintPipeline"),
    stacks=(
        Stack(
            "transformer_blocks",
            streams={"image": "hidden_states", "text": "encoder_hidden_states"},
            returns=("text", "image"),
            aligned=ALIGNED,
        ),
        Stack("single_transformer_blocks", streams={"joint": "hidden_states"}, returns=("joint",), aligned=ALIGNED),
    ),
    guidance="sequential",
    exit="norm_out",
    exit_role="image",
    trunk_arguments=("controlnet_block_samples", "controlnet_single_block_samples"),
)
