"""Z-Image; both guidance branches are one batch, conditional first."""

from chitu_hooks import HookMap, Stack

HOOK_MAP = HookMap(
    name="z_image",
    pipelines=("ZImagePipeline", "ZImageImg2ImgPipeline", "ZImageInpaintPipeline"),
    stacks=(
        Stack("noise_refiner", streams={"image": "x"}, returns=("image",), refiner=True),
        Stack("context_refiner", streams={"text": "x"}, returns=("text",), refiner=True),
        Stack("layers", streams={"joint": "x"}, returns=("joint",), order=("image", "text")),
    ),
    conditioning=("cap_feats",),
    guidance="batched",
)
