"""The embedded model: a small text-to-image model in the FLUX architecture, as a standard diffusers folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

DEFAULTS: dict[str, Any] = {
    "steps": 28,
    "guidance": 3.0,
    "negative_prompt": "",
    "height": 256,
    "width": 256,
    "arguments": {"max_sequence_length": 32},
}
"""The call it was trained for, as fields of `DiffusionTask`: what a user leaves open is filled in from here.

Guidance is true classifier-free guidance; sizes are pixels and the text length is tokens.
"""


def model_folder() -> Path:
    """The folder that ``DiffusionPipeline.from_pretrained`` loads."""
    return Path(__file__).resolve().parent / "model"
