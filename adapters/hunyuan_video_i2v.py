"""HunyuanVideo from a picture, SkyReels' training of it, and FramePack.

Blocks may be told how many of the first tokens belong to the picture, a number that holds for whole sequences only: which
arguments could be cut into shares is left open.
"""

from chitu_hooks import HookMap, Stack

STREAMS = {"image": "hidden_states", "text": "encoder_hidden_states"}

HOOK_MAP = HookMap(
    name="hunyuan_video_i2v",
    pipelines=(
        "HunyuanVideoImageToVideoPipeline",
        "HunyuanSkyreelsImageToVideoPipeline",
        "HunyuanVideoFramepackPipeline",
    ),
    stacks=(
        Stack("transformer_blocks", STREAMS, ("image", "text"), ("image", "text")),
        Stack("single_transformer_blocks", STREAMS, ("image", "text"), ("image", "text")),
    ),
    conditioning=("encoder_hidden_states", "pooled_projections"),
    guidance="sequential",
)
