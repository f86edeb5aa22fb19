"""``parallel="auto"``: degrees from the ranks, the pipeline's guidance and its heads."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch.distributed as dist

from chitu_hooks import HookMap, PatchError
from chitu_hooks.sites import find_sites

from .environment import ranks_here
from .params import Parallel


def auto_parallel(pipe: Any, hook_map: HookMap) -> Parallel:
    """Guidance first, which exchanges once a step; then tokens.

    On two ranks gathered keys and values are as many bytes as Ulysses' four tensors, in one exchange in place of two, and
    nothing is put in another order: FLUX.1 at 2048² took 370.7 and 374.8 ms a step in two runs on two H200s, Ulysses 377.7
    and 376.8. At 1024², where a step is short for the host, the two runs disagree: 78.9 and 105.2 ms, Ulysses 95.4 and 79.7. On
    more ranks Ulysses sends less, as far as it divides the heads. It stays within a machine: its ranks are neighbours, and
    it exchanges most often.

    Where heads run out, the ranks that are left gather too, and do not pass keys round: a ring takes no mask, needs a kernel
    that gives the log-sum-exp, and rounds once more for each part. What it saves is room for one layer's keys and values,
    12 KiB a token of FLUX.1 in bfloat16. It is there by name, ``Parallel(ring=2, ulysses=8)``.

    Raises:
        PatchError: no process group.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise PatchError(
            "parallel='auto' needs processes that are in touch, and no process group is initialised; start with "
            "chitu run --nproc N or torchrun, and call torch.distributed.init_process_group first"
        )
    ranks = dist.get_world_size()
    cfg = 2 if ranks % 2 == 0 and guides(pipe, hook_map) else 1
    context = ranks // cfg
    if context <= 2:
        return Parallel(cfg=cfg, gather=context)
    ulysses = math.gcd(context, ranks_here() or context, *heads_of(pipe, hook_map))
    return Parallel(cfg=cfg, ulysses=ulysses, gather=context // ulysses)


def guides(pipe: Any, hook_map: HookMap) -> bool:
    """Whether a call of `pipe` runs more than one branch of guidance unless told otherwise."""
    if hook_map.guidance not in ("batched", "sequential"):
        return False
    config = getattr(pipe, "config", {})
    if config.get("is_distilled"):
        return False
    parameters = inspect.signature(type(pipe).__call__).parameters
    scale = parameters.get("true_cfg_scale", parameters.get("guidance_scale"))
    return scale is None or not isinstance(scale.default, (int, float)) or scale.default > 1


def heads_of(pipe: Any, hook_map: HookMap) -> set[int]:
    """Numbers of heads of the trunk's attention layers."""
    heads = [
        getattr(site.module, "heads", None) for site in find_sites(pipe, hook_map).attention if site.stack is not None
    ]
    return {count for count in heads if isinstance(count, int)}
