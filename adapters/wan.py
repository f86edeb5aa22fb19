"""Wan 2.1 and 2.2, text and image to video; 2.2 has a second expert."""

from chitu_hooks import HookMap, Stack

HOOK_MAP = HookMap(
    name="wan",
    pipelines=("WanPipeline", "WanImageToVideoPipeline", "WanVideoToVideoPipeline"),
    denoisers=("transformer", "transformer_2"),
    stacks=(Stack("blocks", streams={"image": "hidden_states"}, returns=("image",)),),
    guidance="sequential",
)
