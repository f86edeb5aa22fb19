"""When a cache cannot be used, and when it is no good idea."""

from __future__ import annotations

import inspect
from typing import Any

from chitu_hooks import Generation, Refusal, Sites

DIFFUSERS_CACHES = (
    "fbc_",
    "mag_cache",
    "pyramid_attention",
    "taylorseer",
    "faster_cache",
    "sea_cache",
    "text_kv_cache",
)
"""How the names begin under which diffusers 0.42 registers the hooks of its caches, also by ``apply_…(transformer)``."""

FEW_STEPS = 8
"""Steps of a model that was distilled to need few; each of them does what many steps did, so little is alike."""

STOCHASTIC = ("Ancestral", "LCM", "DDPM", "TCD", "SDE")
"""Parts of the names of schedulers that add noise at every step."""


def cache_of_diffusers(sites: Sites) -> Refusal | None:
    """Two caches would skip each other's work."""
    for denoiser in sites.denoisers:
        if getattr(denoiser.inner, "is_cache_enabled", False):
            return Refusal(
                f"{denoiser.name} has diffusers' own cache enabled", f"call {denoiser.name}.disable_cache() first"
            )
        for path, module in denoiser.inner.named_modules():
            for name in getattr(getattr(module, "_diffusers_hook", None), "hooks", ()):
                if name.startswith(DIFFUSERS_CACHES):
                    return Refusal(
                        f"{denoiser.name}.{path} carries {name!r}, a cache of diffusers",
                        "take it off, or load the pipeline anew",
                    )
    return None


def too_few_blocks(sites: Sites, front: int, back: int | float) -> Refusal | None:
    """Front and back blocks that leave nothing between them."""
    for denoiser in sites.denoisers if front or back else ():
        blocks = sum(len(stack.blocks) for stack in denoiser.stacks if not stack.refiner)
        if front + back >= blocks:
            return Refusal(
                f"front={front} and back={back} leave nothing to skip of the {blocks} blocks of {denoiser.name}",
                f"let front + back be at most {blocks - 1}",
            )
    return None


def refuse_attention(sites: Sites, remedy: str) -> Refusal | None:
    """Attention between tokens in which the keys of tokens that are not computed could not be put back."""
    for site in sites.attention:
        if site.stack is not None and not site.stack.refiner and not site.reachable:
            kind = type(getattr(site.module, "processor", None) or site.module).__name__
            return Refusal(
                f"{site.path}: what {kind} computes cannot be intercepted, so frozen tokens would be left out", remedy
            )
    return None


def few_steps(generation: Generation) -> str | None:
    """A warning about a generation of few steps."""
    steps = generation.num_steps
    if steps is None or steps > FEW_STEPS:
        return None
    return (
        f"{steps} steps are few: a model that was distilled for them changes much from step to step, and a skip shows; "
        "compare with the run without a cache"
    )


def stochastic(scheduler: Any) -> str | None:
    """A warning about a scheduler that adds noise at every step."""
    config = getattr(scheduler, "config", {})
    name = type(scheduler).__name__
    noisy = (
        config.get("stochastic_sampling")
        or str(config.get("algorithm_type", "")).startswith("sde")
        or any(part in name for part in STOCHASTIC)
    )
    return _noise(name) if noisy else None


def stochastic_call(generation: Generation) -> str | None:
    """The same about the scheduler of a generation, which the call may ask for noise: DDIM's `eta`."""
    scheduler, eta = generation.scheduler, generation.kwargs.get("eta")
    if eta and scheduler is not None and "eta" in inspect.signature(scheduler.step).parameters:
        return _noise(f"{type(scheduler).__name__} with eta={eta:g}")
    return stochastic(scheduler)


def unplannable(scheduler: Any, noisy: str | None, guard: int) -> Refusal | None:
    """A scheduler that no plan can be made for; `noisy` is what is said of the noise that it adds."""
    if noisy is not None:
        return Refusal(f"{noisy}, and that cannot be planned", "use a scheduler that adds no noise")
    if guard and getattr(scheduler, "order", 1) > 1:
        why = f"guard={guard} compares one prediction a step, and {type(scheduler).__name__} takes several"
        return Refusal(why, "use guard=0, or a scheduler of order 1")
    return None


def _noise(name: str) -> str:
    return f"{name} adds fresh noise at every step, so what was computed at one step fits the next one less well"
