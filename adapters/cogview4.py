"""CogView4, and its control pipeline."""

from chitu_hooks import HookMap, Stack

HOOK_MAP = HookMap(
    name="cogview4",
    pipelines=("CogView4Pipeline", "CogView4ControlPipeline"),
    stacks=(
        Stack(
            "transformer_blocks",
            streams={"image": "hidden_states", "text": "encoder_hidden_states"},
            returns=("image", "text"),
            aligned={"image_rotary_emb.0": "image@0", "image_rotary_emb.1": "image@0"},
        ),
    ),
    guidance="sequential",
)
