"""Published and measured constants of models: ``adapters/data/<family>.yaml``, and files that `calibrate` wrote."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from chitu_hooks import HookMap, PatchError, Refusal, Sites
from chitu_hooks.errors import nearest

from .schedule import SCHEDULES

NEED_NONE = ("static", "fbcache", "easycache", "taylorseer", "meancache", "blockdance", "pab")
"""Strategies that work on any model without constants."""


def data_folder() -> Path:
    """The folder of constants: beside the package in a checkout, inside it in the wheel."""
    package = Path(__file__).resolve().parent.parent
    shipped = package / "_adapters"
    return (shipped if shipped.is_dir() else package.parent / "adapters") / "data"


@cache
def family(name: str) -> Mapping[str, Any]:
    """Everything that is published about the models of hook map `name`; empty if there is nothing."""
    path = data_folder() / f"{name}.yaml"
    return yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}


def find(sites: Sites, hook_map: HookMap, strategy: str) -> Mapping[str, Any] | None:
    """The constants of `strategy` for the pipeline of `sites`: the entry whose ``match`` its class and config meet."""
    if len(sites.denoisers) != 1:
        return None  # published constants are of one denoiser; two experts have other ones
    config: Mapping[str, Any] = getattr(sites.denoisers[0].inner, "config", {})
    for entry in family(hook_map.name).get(strategy, ()):
        match = entry["match"]
        pipelines = match.get("pipelines")
        fits = all(config.get(key) == value for key, value in match.get("config", {}).items())
        if fits and (pipelines is None or type(sites.pipe).__name__ in pipelines):
            return entry
    return None


def read(path: str, strategy: str, sites: Sites) -> Mapping[str, Any]:
    """What `calibrate` measured and wrote to `path`.

    Raises:
        PatchError: no such file, not one of ours, of another model, or it does not hold constants of `strategy`.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        siblings = [p.name for p in file.parent.glob("*.yaml")] if file.parent.is_dir() else []
        raise PatchError(f"{strategy}: no file of constants {path!r}{nearest(file.name, siblings)}")
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
        model, constants = found["model"], found[strategy]
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError):
        raise PatchError(f"{path!r} holds no constants of {strategy}; chitu calibrate writes them") from None
    own = model_of(sites)
    if model != own:
        raise PatchError(f"{strategy}: {path!r} was measured on {model}, and this is {own}; calibrate this model")
    return constants


def model_of(sites: Sites) -> str:
    """What constants belong to, in words: the denoisers' classes and sizes. Weights are not told apart."""
    names = []
    for denoiser in sites.denoisers:
        blocks = "+".join(str(len(stack.blocks)) for stack in denoiser.stacks)
        names.append(f"{denoiser.name} {type(denoiser.inner).__name__} of {blocks} blocks")
    return ", ".join(names)


def missing(strategy: str, sites: Sites) -> Refusal:
    """No constants are known for this model."""
    return Refusal(
        f"{strategy} needs constants of this model and none are published for {model_of(sites)}",
        f"measure them once with handle.calibrate(prompts) or chitu calibrate, or use {', '.join(NEED_NONE)}, which need none",
    )


def published_schedule(name: str, strategy: str = "static") -> tuple[int, tuple[int, ...]]:
    """Number of steps and computed positions of a published schedule.

    Raises:
        PatchError: no schedule of that name; the message has the nearest.
    """
    schedules = all_schedules()
    if name not in schedules:
        known = (*SCHEDULES, *schedules)
        raise PatchError(f"{strategy}: no schedule {name!r}{nearest(name, known)}")
    entry = schedules[name]
    return entry["of"], tuple(entry["steps"])


@cache
def all_schedules() -> Mapping[str, Any]:
    """Name -> published schedule, of every family."""
    found: dict[str, Any] = {}
    for path in sorted(data_folder().glob("*.yaml")):
        found.update(family(path.stem).get("schedules", {}))
    return found
