"""AuraFlow; positions are added before the trunk, so no block argument follows the tokens."""

from chitu_hooks import HookMap, Stack

HOOK_MAP = HookMap(
    name="auraflow",
    pipelines=("AuraFlowPipeline",),
    stacks=(
        Stack(
            "joint_transformer_blocks",
            streams={"image": "hidden_states", "text": "encoder_hidden_states"},
            returns=("text", "image"),
            aligned={},
        ),
        Stack("single_transformer_blocks", streams={"joint": "hidden_states"}, returns=("joint",), aligned={}),
    ),
    guidance="batched",
)
