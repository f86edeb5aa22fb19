"""By hand, from reading the models: what each stack returns, as names of the block's arguments."""

from __future__ import annotations

TEXT_IMAGE = ("encoder_hidden_states", "hidden_states")
IMAGE_TEXT = ("hidden_states", "encoder_hidden_states")
ONE = ("hidden_states",)

STACKS: dict[str, dict[str, tuple[str, ...]]] = {
    "flux": {"transformer_blocks": TEXT_IMAGE, "single_transformer_blocks": TEXT_IMAGE},
    "flux2_klein": {"transformer_blocks": TEXT_IMAGE, "single_transformer_blocks": ONE},
    "qwen": {"transformer_blocks": TEXT_IMAGE},
    "sd3": {"transformer_blocks": TEXT_IMAGE},
    "zimage": {"noise_refiner": ("x",), "context_refiner": ("x",), "layers": ("x",)},
    "wan": {"blocks": ONE},
    "pixart": {"transformer_blocks": ONE},
    "lumina2": {"noise_refiner": ONE, "context_refiner": ONE, "layers": ONE},
    "flux_dev": {"transformer_blocks": TEXT_IMAGE, "single_transformer_blocks": TEXT_IMAGE},
    "flux2": {"transformer_blocks": TEXT_IMAGE, "single_transformer_blocks": ONE},
    "sana": {"transformer_blocks": ONE},
    "hunyuan_image": {"transformer_blocks": IMAGE_TEXT, "single_transformer_blocks": IMAGE_TEXT},
    "cogview4": {"transformer_blocks": IMAGE_TEXT},
    "chroma": {"transformer_blocks": TEXT_IMAGE, "single_transformer_blocks": ONE},
    "auraflow": {"joint_transformer_blocks": TEXT_IMAGE, "single_transformer_blocks": ONE},
    "hidream": {"double_stream_blocks": IMAGE_TEXT, "single_stream_blocks": ONE},
    "ltx": {"transformer_blocks": ONE},
    "hunyuan_video": {"transformer_blocks": IMAGE_TEXT, "single_transformer_blocks": IMAGE_TEXT},
    "cogvideox": {"transformer_blocks": IMAGE_TEXT},
    "mochi": {"transformer_blocks": IMAGE_TEXT},
    "hunyuan_dit": {"blocks": ONE},
}
