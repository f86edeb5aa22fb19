"""HunyuanImage 2.1, base and distilled, and its refiner."""

from chitu_hooks import HookMap, Stack

STREAMS = {"image": "hidden_states", "text": "encoder_hidden_states"}
RETURNS = ("image", "text")
ORDER = ("image", "text")
ALIGNED = {"image_rotary_emb.0": "image@0", "image_rotary_emb.1": "image@0"}

HOOK_MAP = HookMap(
    name="hunyuan_image",
    pipelines=("HunyuanImagePipeline", "HunyuanImageRefinerPipeline"),
    stacks=(
        Stack("transformer_blocks", STREAMS, RETURNS, ORDER, aligned=ALIGNED),
        Stack("single_transformer_blocks", STREAMS, RETURNS, ORDER, aligned=ALIGNED),
    ),
    guidance="sequential",
)
