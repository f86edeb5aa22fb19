"""Wan 2.1 and 2.2, text and image to video; 2.2 has a second expert."""

from chitu_hooks import HookMap, Stack

ALIGNED = {"rotary_emb.0": "image@1", "rotary_emb.1": "image@1", "temb": "image@1:4"}

HOOK_MAP = HookMap(
    name="wan",
    pipelines=("WanPipeline", "WanImageToVideoPipeline"),
    denoisers=("transformer", "transformer_2"),
    stacks=(Stack("blocks", streams={"image": "hidden_states"}, returns=("image",), aligned=ALIGNED),),
    guidance="sequential",
    exit="norm_out",
)
