"""How the hook map of a pipeline is found: an explicit one, else one of the registry, else an inferred one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diffusers import ModularPipeline

from .errors import HookMapError, nearest
from .hook_map import HookMap, load_hook_map
from .infer import infer_map, infer_stacks


def find_hook_map(pipe: Any, hook_map: HookMap | str | Path | None, registry: Sequence[HookMap]) -> HookMap:
    """The map for `pipe`, with its stacks filled in where it leaves them to inference.

    Args:
        pipe: a loaded pipeline.
        hook_map: a map or a path to one; wins over the registry.
        registry: maps by pipeline class; win over inference.

    Raises:
        HookMapError: the map is for another pipeline, two maps claim this one, or nothing can be inferred.
    """
    if hook_map is not None:
        found = hook_map if isinstance(hook_map, HookMap) else load_hook_map(hook_map)
        _check_claims(pipe, found, registry)
        found = dataclasses.replace(found, source="explicit")
    else:
        found = _from_registry(pipe, registry) or infer_map(_not_modular(pipe))
    return _fill_stacks(pipe, found)


def lineage(pipe: Any) -> list[str]:
    """Names of the pipeline's class and its bases, nearest first."""
    return [cls.__name__ for cls in type(pipe).__mro__]


def _not_modular(pipe: Any) -> Any:
    """`pipe`, which a map may be inferred for.

    Raises:
        HookMapError: it is a modular pipeline, whose blocks may do anything with the denoiser between two steps.
    """
    if isinstance(pipe, ModularPipeline):
        name = type(pipe).__name__
        raise HookMapError(
            f"{name} is a modular pipeline and no hook map claims it; use the ordinary pipeline of this model, or pass "
            f"hook_map=HookMap(name=…, pipelines=({name!r},)) if its blocks call the denoiser as an ordinary pipeline does"
        )
    return pipe


def _check_claims(pipe: Any, hook_map: HookMap, registry: Sequence[HookMap]) -> None:
    name = type(pipe).__name__
    if set(lineage(pipe)) & set(hook_map.pipelines):
        return
    theirs = [other.name for other in registry if set(lineage(pipe)) & set(other.pipelines)]
    raise HookMapError(
        f"hook map {hook_map.name!r} is for {', '.join(hook_map.pipelines)}, not for {name}"
        + (f"; that of {name} is {theirs[0]!r}" if theirs else nearest(name, hook_map.pipelines))
    )


def _from_registry(pipe: Any, registry: Sequence[HookMap]) -> HookMap | None:
    for name in lineage(pipe):
        claims = [hook_map for hook_map in registry if name in hook_map.pipelines]
        if len(claims) > 1:
            raise HookMapError(
                f"hook maps {' and '.join(repr(m.name) for m in claims)} both claim {name}; pass the one to use as hook_map="
            )
        if claims:
            return dataclasses.replace(claims[0], source="registry")
    return None


def _fill_stacks(pipe: Any, hook_map: HookMap) -> HookMap:
    if hook_map.stacks is not None:
        return hook_map
    for name in hook_map.denoisers:
        module = getattr(pipe, name, None)
        if module is not None:
            return dataclasses.replace(hook_map, stacks=infer_stacks(getattr(module, "_orig_mod", module)))
    return hook_map
