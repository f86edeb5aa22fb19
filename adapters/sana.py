"""Sana 1.0 and 1.5, and Sana-Sprint; self-attention is linear, out of reach of kernels, and blocks fold tokens to pictures."""

from chitu_hooks import HookMap, Stack

HOOK_MAP = HookMap(
    name="sana",
    pipelines=(
        "SanaPipeline",
        "SanaPAGPipeline",
        "SanaControlNetPipeline",
        "SanaSprintPipeline",
        "SanaSprintImg2ImgPipeline",
    ),
    stacks=(Stack("transformer_blocks", streams={"image": "hidden_states"}, returns=("image",)),),
    guidance="batched",
)
