"""Modular pipelines of the models that have no other pipeline: FLUX.3, MiniMax H3 and Music 3, Wan-Animate 2."""

from chitu_hooks import HookMap

HOOK_MAP = HookMap(
    name="modular",
    pipelines=(
        "Flux3ModularPipeline",
        "MiniMaxH3ModularPipeline",
        "MiniMaxMusic3ModularPipeline",
        "WanAnimate2ModularPipeline",
    ),
)
