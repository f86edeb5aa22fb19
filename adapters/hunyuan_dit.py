"""HunyuanDiT; blocks of the second half also take what the first half hands over, which is left as it is."""

from chitu_hooks import HookMap, Stack

HOOK_MAP = HookMap(
    name="hunyuan_dit",
    pipelines=("HunyuanDiTPipeline", "HunyuanDiTControlNetPipeline", "HunyuanDiTPAGPipeline"),
    stacks=(Stack("blocks", streams={"image": "hidden_states"}, returns=("image",)),),
    conditioning=("encoder_hidden_states", "encoder_hidden_states_t5"),
    guidance="batched",
)
