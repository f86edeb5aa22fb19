"""CogVideoX and CogVideoX 1.5, from text, a picture, a clip or a control clip."""

from chitu_hooks import HookMap, Stack

HOOK_MAP = HookMap(
    name="cogvideox",
    pipelines=(
        "CogVideoXPipeline",
        "CogVideoXImageToVideoPipeline",
        "CogVideoXVideoToVideoPipeline",
        "CogVideoXFunControlPipeline",
    ),
    stacks=(
        Stack(
            "transformer_blocks",
            streams={"image": "hidden_states", "text": "encoder_hidden_states"},
            returns=("image", "text"),
            aligned={"image_rotary_emb.0": "image@0", "image_rotary_emb.1": "image@0"},
        ),
    ),
    guidance="batched",
)
