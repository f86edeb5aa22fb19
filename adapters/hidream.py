"""HiDream-I1; every block gets a text of its own between the last one's output and its input, so text cannot be cut."""

from chitu_hooks import HookMap, Stack

HOOK_MAP = HookMap(
    name="hidream",
    pipelines=("HiDreamImagePipeline",),
    stacks=(
        Stack(
            "double_stream_blocks",
            streams={"image": "hidden_states", "text": "encoder_hidden_states"},
            returns=("image", "text"),
            order=("image", "text"),
        ),
        Stack("single_stream_blocks", streams={"joint": "hidden_states"}, returns=("joint",), order=("image", "text")),
    ),
    conditioning=("encoder_hidden_states_t5", "encoder_hidden_states_llama3", "pooled_embeds"),
    guidance="batched",
)
