"""From `Parallel` to features."""

from __future__ import annotations

from typing import Any

from diffusers.pipelines.pag.pag_utils import PAGMixin

from chitu_hooks import Feature, HookMap, PatchError

from .agree import Agreement
from .choose import auto_parallel
from .context import ContextParallel
from .guidance import GuidanceParallel
from .mesh import make_mesh
from .params import Parallel
from .prompt import PromptOnce
from .vae import VaeTiles


def make_parallel(parallel: Parallel | str, pipe: Any, hook_map: HookMap) -> list[Feature]:
    """The features that make one picture on `parallel.ranks` ranks; none for a single rank.

    Raises:
        PatchError: not a `Parallel`, no process group that it fits, or perturbed attention guidance, whose processors cut
            the batch and mask tokens by what one rank has.
    """
    if parallel == "auto":
        parallel = auto_parallel(pipe, hook_map)
    if not isinstance(parallel, Parallel):
        raise PatchError(f"parallel={parallel!r} is to be 'auto' or a Parallel, such as Parallel(cfg=2, ulysses=2)")
    if parallel.ranks == 1:
        return []
    if isinstance(pipe, PAGMixin):
        raise PatchError(
            f"{type(pipe).__name__} perturbs attention of a part of the batch, which each rank would take from its own share; "
            f"run it on one process, not on {parallel.ranks}"
        )
    mesh = make_mesh(parallel)
    features: list[Feature] = [Agreement(mesh), VaeTiles(mesh)]
    if parallel.prompt == "once":
        features.append(PromptOnce(mesh))
    if parallel.cfg > 1:
        features.append(GuidanceParallel(mesh))
    if parallel.context > 1:
        features.append(ContextParallel(parallel, mesh))
    return features
