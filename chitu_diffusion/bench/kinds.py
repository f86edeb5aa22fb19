"""How each kind of case is put on a pipeline, and taken off again. A new peer is one class here and a row in `KINDS`.

Every kind leaves the pipeline hooked by a `patch` without kernels, so that all of them are watched by the same features at
the same places.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

from chitu_diffusion import patch
from chitu_diffusion.attention import make_attention
from chitu_diffusion.flexcache import make_params, make_strategy
from chitu_diffusion.flexcache.schedule import growing, uniform
from chitu_hooks import Handle, HookMap
from chitu_hooks.clock import instance_wrapper
from chitu_hooks.errors import nearest

from .cases import Case
from .errors import BenchError

MEASURED = "measured"
"""Value of a parameter in a case: constants, or a profile, that the bench measures on the model before the sweep."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a kind needs to know of the bench."""

    pipe: Any
    hook_map: HookMap | None
    constants: Callable[[int], str]
    """Number of steps -> path of the file of constants measured on this model with so many."""
    profile: Callable[[int], str]
    """The same for the profile of the planned cache."""


class Kind:
    """One way to be faster."""

    package: str | None = None
    """Distribution that has to be installed."""

    def check(self, case: Case) -> None:
        """Raise a `ChituError` for a case that cannot be meant, before anything is loaded."""

    def coupled(self, case: Case) -> bool:
        """Whether a decision depends on all pictures of a batch, so that pictures have to be drawn one by one."""
        return False

    def arguments(self, case: Case) -> dict[str, Any]:
        """What the case changes in the pipeline's call, besides the number of steps of its baseline."""
        return {}

    @contextlib.contextmanager
    def on(self, setting: Setting, case: Case) -> Iterator[Handle]:
        """The pipeline with the case on, hooked."""
        with patch(setting.pipe, hook_map=setting.hook_map) as handle:
            yield handle

    def missing(self) -> str | None:
        """Why it cannot run here: a package that is not installed."""
        if self.package is None:
            return None
        try:
            metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return f"{self.package} is not installed; pip install {self.package} adds it"
        return None


class Baseline(Kind):
    """The pipeline as it is, watched."""


class Chitu(Kind):
    """A strategy of ours."""

    def check(self, case: Case) -> None:
        make_params(case.use, {k: v for k, v in case.params.items() if v != MEASURED})

    def coupled(self, case: Case) -> bool:
        return bool(self._strategy(case).report().get("batch_coupled"))

    def _strategy(self, case: Case) -> Any:
        return make_strategy(make_params(case.use, {k: v for k, v in case.params.items() if v != MEASURED}))

    @contextlib.contextmanager
    def on(self, setting: Setting, case: Case) -> Iterator[Handle]:
        measured = {"profile": setting.profile}
        params = {
            key: measured.get(key, setting.constants)(case.steps) if value == MEASURED else value
            for key, value in case.params.items()
        }
        with patch(setting.pipe, cache=make_params(case.use, params), hook_map=setting.hook_map) as handle:
            yield handle


class Attention(Kind):
    """An attention kernel of ours by name, or `auto`; the pipeline computes every step."""

    def check(self, case: Case) -> None:
        _only_kernel(case)

    @contextlib.contextmanager
    def on(self, setting: Setting, case: Case) -> Iterator[Handle]:
        with patch(setting.pipe, attention=case.use, hook_map=setting.hook_map) as handle:
            yield handle


def _only_kernel(case: Case) -> None:
    if not case.use or case.params:
        raise BenchError(f"{case.kind}: use names a kernel, and there are no params")
    make_attention(case.use)


class FewerSteps(Kind):
    """Free baseline: ask the pipeline for fewer steps."""

    def check(self, case: Case) -> None:
        _only(case, ("count",))
        _count(case)

    def arguments(self, case: Case) -> dict[str, Any]:
        return {"num_inference_steps": case.params["count"]}


SCHEDULES: Mapping[str, Callable[[int, int], tuple[int, ...]]] = {"uniform": uniform, "growing": growing}


class CoarserGrid(Kind):
    """Free baseline: of the baseline's own sigmas, visit those of the computed steps only.

    For an Euler step of flow matching, dx = v·dσ, holding the velocity over a gap is the same as one step across it.
    """

    def check(self, case: Case) -> None:
        _only(case, ("count", "schedule"))
        _count(case)
        schedule = case.params.get("schedule", "uniform")
        if schedule not in SCHEDULES:
            raise BenchError(f"{case.kind}: no schedule {schedule!r}{nearest(str(schedule), SCHEDULES)}")

    @contextlib.contextmanager
    def on(self, setting: Setting, case: Case) -> Iterator[Handle]:
        scheduler = setting.pipe.scheduler
        if type(scheduler).__name__ != "FlowMatchEulerDiscreteScheduler":
            raise BenchError(
                f"{type(scheduler).__name__} is no Euler scheduler of flow matching: a gap is not one larger step there"
            )
        kept = list(SCHEDULES[case.params.get("schedule", "uniform")](case.params["count"], case.steps))

        def thinned(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
            result = wrapped(*args, **kwargs)
            scheduler.timesteps = scheduler.timesteps[kept]
            scheduler.sigmas = scheduler.sigmas[[*kept, -1]]
            scheduler.num_inference_steps = len(kept)
            return result

        with instance_wrapper(scheduler, "set_timesteps", thinned), super().on(setting, case) as handle:
            yield handle


def _only(case: Case, known: tuple[str, ...]) -> None:
    for key in case.params:
        if key not in known:
            raise BenchError(f"{case.kind} has no parameter {key!r}{nearest(key, known)}")
    if case.use:
        raise BenchError(f"{case.kind} uses nothing; leave use: {case.use} out")


def _count(case: Case) -> None:
    count = case.params.get("count")
    if not isinstance(count, int) or isinstance(count, bool) or not 0 < count <= case.steps:
        raise BenchError(f"{case.kind}: count is a whole number from 1 to {case.steps}, the steps, not {count!r}")


class Diffusers(Kind):
    """The caches that diffusers brings itself, ``transformer.enable_cache(...)``."""

    package = "diffusers"
    CONFIGS: Mapping[str, str] = {
        "first_block_cache": "FirstBlockCacheConfig",
        "taylorseer": "TaylorSeerCacheConfig",
        "magcache": "MagCacheConfig",
        "pyramid_attention_broadcast": "PyramidAttentionBroadcastConfig",
    }

    def check(self, case: Case) -> None:
        if case.use not in self.CONFIGS:
            raise BenchError(f"diffusers: no cache {case.use!r}{nearest(case.use, self.CONFIGS)}")
        self._config_class(case, set(case.params))

    def coupled(self, case: Case) -> bool:
        return case.use == "first_block_cache"

    def _config_class(self, case: Case, given: set[str]) -> Any:
        import diffusers

        cls = getattr(diffusers, self.CONFIGS[case.use], None)
        if cls is None:
            raise BenchError(f"diffusers {diffusers.__version__} has no {self.CONFIGS[case.use]}")
        _fields(f"diffusers {case.use}", cls, given)
        return cls

    @contextlib.contextmanager
    def on(self, setting: Setting, case: Case) -> Iterator[Handle]:
        pipe, params = setting.pipe, dict(case.params)
        if case.use == "magcache":
            params.setdefault("num_inference_steps", case.steps)
        if params.get("mag_ratios") == MEASURED:
            params["mag_ratios"] = _ratios(setting.constants(case.steps))
        if case.use == "pyramid_attention_broadcast":
            params["current_timestep_callback"] = lambda: float(pipe._current_timestep)
        for name, value in params.items():
            if isinstance(value, list) and name.endswith("_range"):
                params[name] = tuple(value)
            if name.endswith("_dtype"):
                params[name] = getattr(torch, str(value))
        config = self._config_class(case, set(params))(**params)
        with patch(pipe, hook_map=setting.hook_map) as handle:
            denoisers = [site.inner for site in handle.sites.denoisers]
            try:
                for denoiser in denoisers:
                    denoiser.enable_cache(config)  # type: ignore[operator]
                yield handle
            finally:
                for denoiser in denoisers:
                    if denoiser.is_cache_enabled:
                        denoiser.disable_cache()  # type: ignore[operator]


def _ratios(path: str) -> list[float]:
    """Measured ratios as diffusers takes them: of the first branch, one a step, with 1 for the first."""
    import yaml

    with open(path, encoding="utf-8") as stream:
        return [1.0, *yaml.safe_load(stream)["magcache"]["ratios"][0]]


class CacheDit(Kind):
    """cache-dit: https://github.com/vipshop/cache-dit.

    `taylorseer_order` adds its TaylorSeer calibrator; a `steps_computation_mask` may be the name of one of its presets.
    """

    package = "cache-dit"

    def check(self, case: Case) -> None:
        if case.use != "dbcache":
            raise BenchError(f"cache-dit: no cache {case.use!r}{nearest(case.use, ('dbcache',))}")
        if self.missing() is None:
            given = set(case.params) - {"taylorseer_order"}
            _fields("cache-dit dbcache", _quiet_import("cache_dit").DBCacheConfig, given)

    def coupled(self, case: Case) -> bool:
        return True

    @contextlib.contextmanager
    def on(self, setting: Setting, case: Case) -> Iterator[Handle]:
        cache_dit, pipe, params = _quiet_import("cache_dit"), setting.pipe, dict(case.params)
        order = params.pop("taylorseer_order", None)
        if isinstance(params.get("steps_computation_mask"), str):
            params["steps_computation_mask"] = cache_dit.steps_mask(
                mask_policy=params["steps_computation_mask"], total_steps=case.steps
            )
        calibrator = cache_dit.TaylorSeerCalibratorConfig(taylorseer_order=order) if order else None
        with patch(pipe, hook_map=setting.hook_map) as handle:
            owners = [pipe, *(site.inner for site in handle.sites.denoisers)]
        before = [set(vars(owner)) for owner in owners]
        try:
            cache_dit.enable_cache(pipe, cache_config=cache_dit.DBCacheConfig(**params), calibrator_config=calibrator)
            with patch(pipe, hook_map=setting.hook_map) as handle:
                yield handle
        finally:
            cache_dit.disable_cache(pipe)
            for owner, names in zip(owners, before):  # 1.5.3 leaves its own `forward` on the transformer
                for name in set(vars(owner)) - names:
                    delattr(owner, name)


def _quiet_import(name: str) -> Any:
    """Import `name`, and keep its log lines about every call off the screen."""
    import logging

    module = importlib.import_module(name)
    for logger in list(logging.root.manager.loggerDict):
        if logger.lower().replace("-", "_").startswith(name):
            logging.getLogger(logger).setLevel(logging.ERROR)
    return module


def _fields(what: str, cls: Any, given: set[str]) -> None:
    names = [field.name for field in dataclasses.fields(cls)]
    for key in given:
        if key not in names:
            raise BenchError(f"{what} has no parameter {key!r}{nearest(key, names)}")


KINDS: dict[str, Kind] = {
    "baseline": Baseline(),
    "chitu": Chitu(),
    "attention": Attention(),
    "fewer steps": FewerSteps(),
    "coarser grid": CoarserGrid(),
    "diffusers": Diffusers(),
    "cache-dit": CacheDit(),
}
"""Name in a case file -> what puts it on."""

OURS = {"chitu": "flexcache", "attention": "attention"}
"""Kinds that are our work, and the package of ours that it is in."""

PEERS = ("diffusers", "cache-dit")
"""Kinds that are other people's work."""
