"""LTX-Video, from text, a picture or several conditions."""

from chitu_hooks import HookMap, Stack

HOOK_MAP = HookMap(
    name="ltx",
    pipelines=("LTXPipeline", "LTXImageToVideoPipeline", "LTXConditionPipeline", "LTXI2VLongMultiPromptPipeline"),
    stacks=(
        Stack(
            "transformer_blocks",
            streams={"image": "hidden_states"},
            returns=("image",),
            aligned={"image_rotary_emb.0": "image@1", "image_rotary_emb.1": "image@1"},
        ),
    ),
    guidance="batched",
)
