"""Lumina-Image 2.0."""

from chitu_hooks import HookMap, Stack

HOOK_MAP = HookMap(
    name="lumina2",
    pipelines=("Lumina2Pipeline",),
    stacks=(
        Stack("context_refiner", streams={"text": "hidden_states"}, returns=("text",), refiner=True),
        Stack("noise_refiner", streams={"image": "hidden_states"}, returns=("image",), refiner=True),
        Stack(
            "layers", streams={"joint": "hidden_states"}, returns=("joint",), aligned={"image_rotary_emb": "joint@1"}
        ),
    ),
    guidance="sequential",
)
