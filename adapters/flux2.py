"""FLUX.2 dev and klein."""

from chitu_hooks import HookMap, Stack

HOOK_MAP = HookMap(
    name="flux2",
    pipelines=("Flux2Pipeline", "Flux2KleinPipeline", "Flux2KleinInpaintPipeline"),
    stacks=(
        Stack(
            "transformer_blocks",
            streams={"image": "hidden_states", "text": "encoder_hidden_states"},
            returns=("text", "image"),
        ),
        Stack("single_transformer_blocks", streams={"joint": "hidden_states"}, returns=("joint",)),
    ),
    guidance="sequential",
)
