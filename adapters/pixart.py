"""PixArt-alpha and PixArt-Sigma."""

from chitu_hooks import HookMap, Stack

HOOK_MAP = HookMap(
    name="pixart",
    pipelines=("PixArtAlphaPipeline", "PixArtSigmaPipeline", "PixArtSigmaPAGPipeline"),
    stacks=(Stack("transformer_blocks", streams={"image": "hidden_states"}, returns=("image",), aligned={}),),
    guidance="batched",
    exit="norm_out",
)
