"""HunyuanVideo, text to video."""

from chitu_hooks import HookMap, Stack

STREAMS = {"image": "hidden_states", "text": "encoder_hidden_states"}
RETURNS = ("image", "text")
ORDER = ("image", "text")

HOOK_MAP = HookMap(
    name="hunyuan_video",
    pipelines=("HunyuanVideoPipeline",),
    stacks=(
        Stack(
            "transformer_blocks",
            STREAMS,
            RETURNS,
            ORDER,
            aligned={"freqs_cis.0": "image@0", "freqs_cis.1": "image@0"},
        ),
        Stack(
            "single_transformer_blocks",
            STREAMS,
            RETURNS,
            ORDER,
            aligned={"image_rotary_emb.0": "image@0", "image_rotary_emb.1": "image@0"},
        ),
    ),
    conditioning=("encoder_hidden_states", "pooled_projections"),
    guidance="sequential",
)
