"""Wan from a clip: a pipeline that takes no second expert."""

from chitu_hooks import HookMap, Stack

ALIGNED = {"rotary_emb.0": "image@1", "rotary_emb.1": "image@1", "temb": "image@1:4"}

HOOK_MAP = HookMap(
    name="wan_v2v",
    pipelines=("WanVideoToVideoPipeline",),
    stacks=(Stack("blocks", streams={"image": "hidden_states"}, returns=("image",), aligned=ALIGNED),),
    guidance="sequential",
    exit="norm_out",
)
