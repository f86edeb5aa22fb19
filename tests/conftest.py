"""Everything here runs offline, on the CPU, with one thread a test process."""

from __future__ import annotations

import os

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
