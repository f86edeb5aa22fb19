"""`meancache` against what it says it is: a coarser grid, the paper's formula, and a latent in float32 inside a gap."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch
from caches import STEPS
from probes import difference
from tiny import build, call_arguments, run

from chitu_diffusion import MeanCache, patch
from chitu_hooks import RefusedError

pytestmark = pytest.mark.filterwarnings("ignore::chitu_hooks.ChituWarning")


def run_in(dtype: torch.dtype, pipe: Any, steps: int, **over: Any) -> torch.Tensor:
    """`run` of flux with its embeddings, and so its latents, in `dtype`."""
    kwargs = call_arguments("flux", steps, guided=False)
    kwargs = {k: v.to(dtype) if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
    return pipe(**kwargs, **over).images


def test_meancache_with_window_1_is_a_coarser_grid() -> None:
    """Holding the velocity of an Euler flow over a gap is one larger step: plain diffusers on the sigmas that remain."""
    computed, sigmas = (0, 1, 3, 6), [1 - i / STEPS for i in range(STEPS)]
    pipe = build("flux")
    coarse = run("flux", pipe, 4, sigmas=[sigmas[i] for i in computed], guided=False)
    with patch(pipe, cache=MeanCache(steps=computed)) as handle:
        result = run("flux", pipe, STEPS, sigmas=sigmas, guided=False)
        assert handle.report().branches["transformer/cond"] == {"computed": 4, "skipped": 0, "replaced": 6}
    assert difference(result, coarse) <= 2e-6
    assert difference(coarse, run("flux", pipe, STEPS, sigmas=sigmas, guided=False)) > 1e-4


def test_meancache_keeps_the_latent_in_float32_inside_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """One gap in bfloat16: the latent plus the velocity times the gap, rounded once and not at every sub-step."""
    sigmas, seen = [1 - i / 40 for i in range(40)], []
    pipe = build("flux").to(torch.bfloat16)
    pipe.transformer.register_forward_hook(lambda _, args, kwargs, out: seen.append((kwargs, out)), with_kwargs=True)
    errors = []
    for keep in (True, False):
        seen.clear()
        if not keep:
            monkeypatch.setattr("chitu_diffusion.flexcache.latent.enter", lambda *args, **kwargs: None)
        with patch(pipe, cache=MeanCache(steps=(0,))):
            result = run_in(torch.bfloat16, pipe, 40, sigmas=sigmas)
        ((kwargs, out),) = seen
        assert result.dtype == torch.bfloat16
        errors.append(difference(result, kwargs["hidden_states"].double() - out[0].double()))
    half_a_place = 2**-8
    assert errors[0] <= half_a_place < errors[1]


def test_meancache_leaves_a_latent_of_float32_beside_a_denoiser_in_16_bits() -> None:
    """Wan's latents are float32 whatever its denoiser's dtype; a last step that is skipped gives them back as such."""
    pipe = build("wan").to(torch.bfloat16)
    pipe.scheduler = diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    assert run("wan", pipe, STEPS).dtype == torch.float32
    with patch(pipe, cache=MeanCache(steps=(0, 4))) as handle:
        assert run("wan", pipe, STEPS).dtype == torch.float32
        assert handle.report().features[0]["hits"] > 0


def test_meancache_with_a_window() -> None:
    """The paper's formula with the latents themselves: J = (z_t - z_r - (t - r) v_r) / (t - r)^2."""
    computed, window = (0, 1, 2, 4, 7), 2
    pipe, log, position = build("flux"), [], 0
    stock = pipe.transformer.forward
    with patch(build("flux"), cache=MeanCache(steps=computed, window=window)) as handle:
        result = run("flux", handle.pipe, STEPS, guided=False)
        sigmas = handle.pipe.scheduler.sigmas.tolist()

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal position
        z, i = kwargs["hidden_states"].double(), position
        position += 1
        if i in computed:
            velocity = stock(*args, **kwargs)[0]
        else:
            at = max(c for c in computed if c < i)
            end = min((c for c in computed if c > i), default=STEPS)
            z_t, velocity = log[at]
            if at >= window:
                z_r, v_r = log[at - window]
                span = sigmas[at] - sigmas[at - window]
                slope = (z_t - z_r - span * v_r.double()) / span**2
                velocity = (velocity + (sigmas[end] - sigmas[at]) * slope).float()
        log.append((z, velocity))
        return (velocity,)

    pipe.transformer.forward = forward
    assert difference(result, run("flux", pipe, STEPS, guided=False)) < 1e-5
    with patch(pipe := build("flux"), cache=MeanCache(steps=computed)):
        assert difference(result, run("flux", pipe, STEPS, guided=False)) > 1e-4


def test_meancache_with_a_window_needs_sigmas() -> None:
    with pytest.raises(RefusedError, match=r"meancache: window=2 takes the slope .* DPMSolverMultistepScheduler is no"):
        patch(build("pixart"), cache=MeanCache(steps=(0, 1), window=2))
    pipe = build("flux")
    with patch(pipe, cache=MeanCache(steps=(0, 1), window=2)):
        pipe.scheduler = diffusers.FlowMatchHeunDiscreteScheduler()
        with pytest.raises(RefusedError, match="FlowMatchHeunDiscreteScheduler is no"):
            run("flux", pipe, STEPS)
