"""Compiling a pipeline's denoisers block by block, also those whose class does not name its repeated blocks."""

from __future__ import annotations

from typing import Any

import torch._dynamo.config

from chitu_diffusion import patch
from chitu_hooks import HookMap

GRAPHS = 64
"""Of one block class: every setting that takes turns may have its own."""


def compile_blocks(pipe: Any, hook_map: HookMap | None = None, **options: Any) -> None:
    """Compile every block of every stack, as ``compile_repeated_blocks(fullgraph=True, **options)`` does."""
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = GRAPHS
    with patch(pipe, hook_map=hook_map) as handle:
        blocks = [block.module for site in handle.sites.denoisers for stack in site.stacks for block in stack.blocks]
    for block in blocks:
        block.compile(fullgraph=True, **options)
