"""FLUX.1: dev, schnell, Fill, Kontext, Control, ControlNet."""

from chitu_hooks import HookMap, Stack

STREAMS = {"image": "hidden_states", "text": "encoder_hidden_states"}

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
        Stack("transformer_blocks", streams=STREAMS, returns=("text", "image")),
        Stack("single_transformer_blocks", streams=STREAMS, returns=("text", "image")),
    ),
    conditioning=("encoder_hidden_states", "pooled_projections"),
    guidance="sequential",
)
