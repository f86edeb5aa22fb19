"""The table that `attention="auto"` reads: which kernel was measured to be the fastest, on which device, at which shape.

Only ``chitu bench attention --write`` changes the file. It is never timed at run time: two runs, or two ranks, that
chose differently would give different pictures.
"""

from __future__ import annotations

from pathlib import Path

import torch
import yaml

from .kernel import Kernel
from .table import kernels

FILE = Path(__file__).with_name("fastest.yaml")

Rows = dict[torch.dtype, tuple[tuple[int, int, tuple[Kernel, ...]], ...]]


def fastest() -> Rows:
    """The rows for this machine's CUDA device, with the kernels that are available, loaded and not lossy.

    Returns:
        dtype -> rows of (head dim, from how many query tokens, kernels from the fastest), longest first for each head
        dim; empty without a CUDA device or without measurements for it.
    """
    if not torch.cuda.is_available() or not FILE.is_file():
        return {}
    capability = "%d.%d" % torch.cuda.get_device_capability()
    rows: dict[torch.dtype, list[tuple[int, int, tuple[Kernel, ...]]]] = {}
    for row in yaml.safe_load(FILE.read_text())["rows"]:
        if row["capability"] == capability:
            ranked = tuple(_usable(row["kernels"]))
            rows.setdefault(getattr(torch, row["dtype"]), []).append((row["head_dim"], row["tokens"], ranked))
    return {dtype: tuple(sorted(found, key=lambda r: (r[0], -r[1]))) for dtype, found in rows.items()}


def _usable(names: list[str]) -> list[Kernel]:
    usable = []
    for name in names:
        kernel = kernels().get(name)
        if kernel is not None and kernel.exactness != "lossy" and kernel.available() is None:
            kernel.load()
            usable.append(kernel)
    return usable
