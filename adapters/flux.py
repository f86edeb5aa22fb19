"""FLUX.1: dev, schnell, Fill, Kontext, Control, ControlNet."""

from chitu_hooks import HookMap, Stack

STREAMS = {"image": "hidden_states", "text": "encoder_hidden_states"}
ALIGNED = {"image_rotary_emb.0": "joint@0", "image_rotary_emb.1": "joint@0"}

HOOK_MAP = HookMap(
    name="flux",
    pipelines=(
        "FluxPipeline",
        "FluxImg2ImgPipeline",
        "FluxInpaintPipeline",
        "FluxFillPipeline",
        "FluxKontextPipeline",
        "FluxKontextInpaintPipeline",
        "FluxControlPipeline",
        "FluxControlImg2ImgPipeline",
        "FluxControlInpaintPipeline",
        "FluxControlNetPipeline",
        "FluxControlNetImg2ImgPipeline",
        "FluxControlNetInpaintPipeline",
    ),
    stacks=(
        Stack("transformer_blocks", streams=STREAMS, returns=("text", "image"), aligned=ALIGNED),
        Stack("single_transformer_blocks", streams=STREAMS, returns=("text", "image"), aligned=ALIGNED),
    ),
    conditioning=("encoder_hidden_states", "pooled_projections"),
    guidance="sequential",
    exit="norm_out",
    trunk_arguments=("controlnet_block_samples", "controlnet_single_block_samples"),
)
