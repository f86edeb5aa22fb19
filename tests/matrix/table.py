"""The rows: which transformer classes diffusers has, and how each is run here."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

import diffusers as D
import diffusers.models.transformers as package
import tiny
import torch
from variants import VARIANTS
from variants_more import FURTHER_VARIANTS, INT8_WEIGHTS

from . import driven
from .driven import Entry
from .images import IMAGES
from .others import OTHERS
from .videos import VIDEOS

ENTRIES: dict[str, Entry] = {**IMAGES, **VIDEOS, **OTHERS}

ALL_VARIANTS = {**VARIANTS, **FURTHER_VARIANTS}

NOT_BUILT = {
    "MiniMaxMusic3RVQDepthDecoder": "an autoregressive decoder of audio codes, called without a timestep: no denoiser",
    "T5FilmDecoder": "no pipeline of diffusers uses it any more",
}
"""Classes of that folder that are not run, and why."""


class Model(Protocol):
    """One row."""

    @property
    def branches(self) -> int | None:
        """Denoiser calls a step; None where they vary."""

    def build(self) -> Any:
        """A fresh pipeline, always the same."""

    def run(self, pipe: Any, steps: int) -> torch.Tensor:
        """The final latents of one call."""

    def named(self) -> dict[str, str]:
        """The cells that name the row."""


@dataclass(frozen=True)
class Whole:
    """A tiny pipeline of `tiny`."""

    transformer: str
    pipeline: str
    key: str

    def build(self) -> Any:
        return tiny.build(self.key)

    def run(self, pipe: Any, steps: int) -> torch.Tensor:
        return tiny.run(self.key, pipe, steps)

    @property
    def branches(self) -> int:
        return tiny.ALL[self.key].branches

    def named(self) -> dict[str, str]:
        return {"transformer": self.transformer, "run as": self.pipeline}


@dataclass(frozen=True)
class Bare:
    """A transformer without a tiny pipeline, driven."""

    transformer: str

    def build(self) -> Any:
        return driven.build(transformer_classes()[self.transformer], ENTRIES[self.transformer])

    def run(self, pipe: Any, steps: int) -> torch.Tensor:
        return pipe(steps)[0]

    @property
    def branches(self) -> int:
        return ENTRIES[self.transformer].branches

    def named(self) -> dict[str, str]:
        return {"transformer": self.transformer, "run as": "driven transformer"}


@dataclass(frozen=True)
class Variation:
    """A variant of `variants.VARIANTS`: another pipeline of a family, or another way to call it."""

    variant: str
    branches = None

    @property
    def lacks(self) -> str | None:
        """The package that it needs and that is not installed: then the row stays as it is published."""
        needed = "torchao" if self.variant in INT8_WEIGHTS else None
        return needed if needed and find_spec(needed) is None else None

    def build(self) -> Any:
        variant = ALL_VARIANTS[self.variant]()
        vars(variant.pipe)[CALL] = variant.call
        return variant.pipe

    def run(self, pipe: Any, steps: int) -> torch.Tensor:
        return vars(pipe)[CALL]()

    def named(self) -> dict[str, str]:
        return {"variant": self.variant}


CALL = "_variant_call"
"""Attribute of a variant's pipeline: how it is called."""


@functools.cache
def transformer_classes() -> dict[str, type]:
    """Every model class that a file of diffusers' folder of transformers defines and that denoises or may do so."""
    found: dict[str, type] = {}
    for module in pkgutil.iter_modules(package.__path__):
        scope = vars(importlib.import_module(f"{package.__name__}.{module.name}"))
        for name, value in scope.items():
            if isinstance(value, type) and issubclass(value, D.ModelMixin) and value.__module__ == scope["__name__"]:
                found[name] = value
    return dict(sorted(found.items()))


@functools.cache
def whole_pipelines() -> dict[str, list[tuple[str, str]]]:
    """Transformer class -> the tiny pipelines that have one: name and pipeline class."""
    found: dict[str, list[tuple[str, str]]] = {}
    for name in tiny.ALL:
        pipe = tiny.build(name)
        found.setdefault(type(pipe.transformer).__name__, []).append((name, type(pipe).__name__))
    return found


def models() -> list[Model]:
    """The models in alphabetical order; a transformer class may be run by several pipelines."""
    found: list[Model] = []
    for name in transformer_classes():
        wholes = {pipeline: key for key, pipeline in reversed(whole_pipelines().get(name, []))}
        found += [Whole(name, pipeline, wholes[pipeline]) for pipeline in sorted(wholes)]
        if not wholes and name in ENTRIES:
            found.append(Bare(name))
    return found


def variations() -> list[Variation]:
    return [Variation(name) for name in ALL_VARIANTS]
