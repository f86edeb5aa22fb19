"""`patch`: find the map, bind the features, hook the pipeline, and hand back the handle that takes it all off again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from .engine import Engine, refuse_whole_compile, warn_left_behind
from .errors import PatchError, RefusedError
from .feature import Feature, Refusal, needs_seam
from .find import find_hook_map
from .hook_map import HookMap
from .report import Report, make_report
from .sites import Sites, find_sites


class Handle:
    """What `patch` returns. A context manager; leaving it undoes the patch."""

    def __init__(self, engine: Engine, hooks: contextlib.ExitStack) -> None:
        self._engine = engine
        self._hooks: contextlib.ExitStack | None = hooks

    @property
    def pipe(self) -> Any:
        return self._engine.sites.pipe

    @property
    def hook_map(self) -> HookMap:
        return self._engine.hook_map

    @property
    def sites(self) -> Sites:
        return self._engine.sites

    @property
    def features(self) -> tuple[Feature, ...]:
        return tuple(self._engine.features)

    @property
    def active(self) -> bool:
        """Whether the hooks are in place."""
        return self._hooks is not None

    def undo(self) -> None:
        """Take every hook out again; a second call does nothing.

        What somebody else has wrapped on top meanwhile is left, ours below it only passes through, and a warning and
        the report say so.

        Raises:
            PatchError: a generation is running.
        """
        if self._hooks is None:
            return
        if self._engine.generation is not None:
            raise PatchError(f"{self} is generating; undo it when the call has returned")
        hooks, self._hooks = self._hooks, None
        hooks.close()
        warn_left_behind(self._engine)

    def report(self) -> Report:
        """What was asked for, what acts, and what the last generation did."""
        return make_report(self._engine, self.active)

    @contextlib.contextmanager
    def also(self, *features: Feature) -> Iterator[Handle]:
        """Run further features for a while: progress bars, stop watches, probes.

        What is hooked already stays in place, so that nothing is traced or compiled again; seams that only these
        features need are added and taken out again. The report of a generation lists them only while they are there.

        Raises:
            PatchError: the handle is undone, a generation is running, or a feature of that name is there already.
            RefusedError: a feature cannot do what it is for on this pipeline. Nothing was changed.
        """
        if self._hooks is None or self._engine.generation is not None:
            raise PatchError(
                f"{self} takes no further features {'while it is generating' if self.active else 'any more'}"
            )
        _check_features(self._engine, [*self._engine.features, *features], features)
        with self._engine.joined(features):
            yield self

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()

    def __deepcopy__(self, memo: Any) -> None:
        return None  # a copied pipeline is not patched

    def __reduce__(self) -> Any:
        return (_no_handle, ())

    def __repr__(self) -> str:
        features = ", ".join(feature.name for feature in self._engine.features) or "nothing on"
        return f"<Handle on {type(self.pipe).__name__}: {features}{'' if self.active else ', undone'}>"


AnyHandle = TypeVar("AnyHandle", bound=Handle)


def _no_handle() -> None:
    """What a pickled handle becomes: none."""


def patch(
    pipe: Any,
    features: Sequence[Feature] = (),
    *,
    hook_map: HookMap | str | Path | None = None,
    registry: Sequence[HookMap] = (),
) -> Handle:
    """Hook a loaded pipeline in place.

    Args:
        pipe: a diffusers pipeline with its components loaded.
        features: what to attach; none changes nothing.
        hook_map: a map or the path of one, in place of the registry's or an inferred one.
        registry: the maps to choose from by pipeline class.

    Returns:
        The handle; ``handle.undo()`` or leaving ``with patch(...)`` restores every object.

    Raises:
        PatchError: `pipe` is not a pipeline, or is patched already.
        HookMapError: no map fits.
        RefusedError: a feature cannot do exactly what it is for on this pipeline. Nothing was changed.
    """
    return patch_as(Handle, pipe, features, hook_map=hook_map, registry=registry)


def patch_as(
    kind: type[AnyHandle],
    pipe: Any,
    features: Sequence[Feature] = (),
    *,
    hook_map: HookMap | str | Path | None = None,
    registry: Sequence[HookMap] = (),
) -> AnyHandle:
    """`patch` with a handle of class `kind`, which may have further methods."""
    check_pipe(pipe)
    return patch_with(kind, pipe, features, find_hook_map(pipe, hook_map, registry))


def patch_with(kind: type[AnyHandle], pipe: Any, features: Sequence[Feature], found: HookMap) -> AnyHandle:
    """`patch_as` where `check_pipe` was asked and the map is found already."""
    engine = Engine(find_sites(pipe, found), found, list(features))
    _bind(engine)
    with contextlib.ExitStack() as hooks:
        engine.install(hooks)
        handle = kind(engine, hooks.pop_all())
    vars(pipe)[LIVE] = handle
    handle._hooks.callback(vars(pipe).pop, LIVE, None)  # type: ignore[union-attr]
    return handle


LIVE = "_chitu_handle"
"""Attribute of a patched pipeline: its live handle."""


def check_pipe(pipe: Any) -> None:
    """Raises:
    PatchError: `pipe` is not a pipeline, or is patched already.
    """
    components = getattr(pipe, "components", None)
    if not isinstance(components, dict) or not callable(pipe) or isinstance(pipe, nn.Module):
        raise PatchError(
            f"patch takes a loaded diffusers pipeline, not {type(pipe).__name__}; "
            "load one with DiffusionPipeline.from_pretrained(...)"
        )
    live = vars(pipe).get(LIVE)
    if live is not None and live.pipe is pipe:  # a shallow copy carries the handle of another pipeline
        raise PatchError(
            f"this pipeline is patched already by {live!r}; undo that handle first, or patch once with everything"
        )


def _bind(engine: Engine) -> None:
    refuse_whole_compile(engine)
    _check_features(engine, engine.features, engine.features)


def _check_features(engine: Engine, features: Sequence[Feature], new: Sequence[Feature]) -> None:
    """Raise unless every name among `features` is there once and each of the `new` ones agrees to be bound."""
    names = [feature.name for feature in features]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise PatchError(f"feature {twice[0]!r} is given {names.count(twice[0])} times; give it once")
    refusals = [(f, refusal) for f in new if (refusal := _refusal(engine, f)) is not None]
    if refusals:
        raise RefusedError(". ".join(f"{feature.name}: {refusal}" for feature, refusal in refusals))


def _refusal(engine: Engine, feature: Feature) -> Refusal | None:
    """Why `feature` cannot be used on this pipeline: it needs blocks where there are none, or says so itself."""
    for denoiser in engine.sites.denoisers if needs_seam(feature, "block") else ():
        if not denoiser.stacks:
            return Refusal(
                f"{denoiser.name} ({type(denoiser.inner).__name__}) has no stack of blocks, so there is no trunk to skip or watch",
                "features of the clock, denoiser and attention seams can be used here",
            )
    return feature.bind(engine.sites, engine.hook_map)
