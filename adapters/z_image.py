"""Z-Image; both guidance branches are one batch, conditional first."""

from chitu_hooks import HookMap, Stack

ALIGNED = {"freqs_cis": "joint@1", "noise_mask": "joint@1"}

HOOK_MAP = HookMap(
    name="z_image",
    pipelines=("ZImagePipeline", "ZImageImg2ImgPipeline", "ZImageInpaintPipeline"),
    stacks=(
        Stack("noise_refiner", streams={"image": "x"}, returns=("image",), refiner=True),
        Stack("context_refiner", streams={"text": "x"}, returns=("text",), refiner=True),
        Stack("layers", streams={"joint": "x"}, returns=("joint",), order=("image", "text"), aligned=ALIGNED),
    ),
    conditioning=("cap_feats",),
    guidance="batched",
    exit="all_final_layer.2-1",
    trunk_arguments=("controlnet_block_samples",),
)
