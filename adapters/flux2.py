"""FLUX.2 dev and klein."""

from chitu_hooks import HookMap, Stack

ALIGNED = {"image_rotary_emb.0": "joint@0", "image_rotary_emb.1": "joint@0"}

HOOK_MAP = HookMap(
    name="flux2",
    pipelines=("Flux2Pipeline", "Flux2KleinPipeline", "Flux2KleinInpaintPipeline"),
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
)
