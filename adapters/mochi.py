"""Mochi 1; attention drops the padding of each sample's text, so text cannot be cut."""

from chitu_hooks import HookMap, Stack

HOOK_MAP = HookMap(
    name="mochi",
    pipelines=("MochiPipeline",),
    stacks=(
        Stack(
            "transformer_blocks",
            streams={"image": "hidden_states", "text": "encoder_hidden_states"},
            returns=("image", "text"),
            order=("image", "text"),
        ),
    ),
    guidance="batched",
)
