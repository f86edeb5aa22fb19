"""Everything here runs offline, on the CPU, with one thread a test process."""

from __future__ import annotations

import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_grad():
    """Tests that call a transformer by hand do what a pipeline does."""
    with torch.no_grad():
        yield


@pytest.fixture(scope="session")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Profiles of tiny pipelines for the planned cache, by name."""
    from planned import calibrated  # what it imports needs the environment that is set here

    folder, found = tmp_path_factory.mktemp("profiles"), {}
    for name in ("flux", "wan", "pixart", "flux latents"):
        found[name] = str(folder / f"{name}.safetensors")
        calibrated(name, Path(found[name]))
    return found
