"""The embedded model in a loop of its own, for `planned_ablation.py`: full runs with everything recorded, and runs of plans.

B pictures, N steps, S tokens, C channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline

from chitu_diffusion.demo import DEFAULTS, model_folder
from chitu_diffusion.flexcache.planning import Plan, Tables
from chitu_diffusion.flexcache.planning.combine import Pairs

BANDS = (0.0, 0.15, 0.35, 2.0)
"""Edges of bands of spatial frequency, as parts of the highest along one axis."""
PER_PICTURE = ("encoder_hidden_states", "pooled_projections")
"""Inputs of the model that hold two rows a picture: without and with the prompt."""
CHUNK = 24
"""Pictures that are decoded at once."""


@dataclass(frozen=True)
class Batch:
    """What was recorded of B full runs: inputs of the model, velocities of the branches, results."""

    inputs: dict[str, torch.Tensor]
    start: torch.Tensor
    sigmas: np.ndarray
    branches: torch.Tensor
    """(2, N, B, S * C) on the CPU: without and with the prompt."""
    guidance: float
    final: torch.Tensor
    pictures: torch.Tensor

    def some(self, which: Sequence[int]) -> Batch:
        """Only the pictures of these numbers."""
        chosen = list(which)
        return replace(
            self, inputs=self.inputs_of(chosen), start=self.start[chosen], branches=self.branches[:, :, chosen],
            final=self.final[chosen], pictures=self.pictures[chosen],
        )  # fmt: skip

    def inputs_of(self, chosen: Sequence[int]) -> dict[str, torch.Tensor]:
        """The model's inputs for the pictures of these numbers."""
        pairs = [*chosen, *(len(self.start) + number for number in chosen)]
        return {name: part[pairs] if name in PER_PICTURE else part for name, part in self.inputs.items()}

    def tables(self, which: slice = slice(None)) -> Tables:
        """Of the guided velocities of some of the pictures."""
        return self._tables(self._guided(which), which)

    def branch_tables(self) -> list[Tables]:
        """Of what each branch adds to the guided velocity."""
        weights = (1 - self.guidance, self.guidance)
        return [self._tables(weight * branch, slice(None)) for weight, branch in zip(weights, self.branches)]

    def parts_tables(self) -> dict[str, Tables]:
        """Of what a half step forecasts, by the branch that it computes."""
        off, on = self.branches
        parts = {"conditional": on - off, "unconditional": on}
        return {action: self._tables(part, slice(None)) for action, part in parts.items()}

    def band_tables(self) -> list[Tables]:
        """Of the guided velocity in each of `BANDS`; their squares add up to the whole."""
        return [self._tables(part, slice(None)) for part in split(self._guided(slice(None)))]

    def _guided(self, which: slice) -> torch.Tensor:
        off, on = self.branches[:, :, which]
        return off + self.guidance * (on - off)

    def _tables(self, velocities: torch.Tensor, which: slice) -> Tables:
        rows = velocities.double().transpose(0, 1)
        count = self.final[0].numel()
        gram = rows @ rows.transpose(1, 2) / count
        final = self.final[which].double().square().flatten(1).mean(1)
        return Tables(self.sigmas, gram.numpy(), final.cpu().numpy())


def split(velocities: torch.Tensor) -> list[torch.Tensor]:
    """(N, B, S * C) -> the bands' spectra, real and imaginary parts side by side."""
    steps, pictures, size = velocities.shape
    side = round((size / 64) ** 0.5)
    grid = velocities.view(steps, pictures, side, side, 16, 2, 2).permute(0, 1, 4, 2, 5, 3, 6)
    spectrum = torch.fft.fft2(grid.reshape(steps, pictures, 16, 2 * side, 2 * side), norm="ortho")
    axis = torch.fft.fftfreq(2 * side)
    radius = 2 * torch.hypot(axis[:, None], axis[None])
    return [
        torch.view_as_real(spectrum * ((radius >= low) & (radius < high))).flatten(2) for low, high in pairwise(BANDS)
    ]


@dataclass(frozen=True)
class Halved(Plan):
    """A plan at some of whose steps one branch of guidance is computed and the other one forecast, for half of the FLOPs.

    Attributes:
        actions: position -> the branch that is computed there, ``conditional`` or ``unconditional``.
        halves: position -> pairs of a position at which both are computed and its weight. Where `actions` says ``conditional``,
            they make up the difference between the branches; where it says ``unconditional``, the branch with the prompt.
    """

    actions: Mapping[int, str] = field(default_factory=dict)
    halves: Mapping[int, Pairs] = field(default_factory=dict)


class Sampler:
    """The pipeline's own loop: Euler steps on the guided velocity, with the latent in float32."""

    def __init__(self, device: str) -> None:
        self.pipe: Any = DiffusionPipeline.from_pretrained(str(model_folder()), torch_dtype=torch.float32).to(device)
        self.device, self.guidance = device, float(DEFAULTS["guidance"])
        self.height, self.width = DEFAULTS["height"], DEFAULTS["width"]
        self.length = DEFAULTS["arguments"]["max_sequence_length"]

    @torch.no_grad()
    def record(self, items: Sequence[tuple[str, int]], steps: int) -> Batch:
        """Full runs of (prompt, seed) pairs."""
        inputs, start = self._inputs(items)
        sigmas, times = self._schedule(steps)
        latent, branches = start.clone(), torch.empty(2, steps, len(items), start[0].numel())
        for step in range(steps):
            off, on = self._branches(inputs, latent, times[step])
            branches[:, step] = torch.stack([off, on]).flatten(2).cpu()
            latent = latent + (sigmas[step + 1] - sigmas[step]) * (off + self.guidance * (on - off))
        pictures = self.decode(latent)
        return Batch(inputs, start, np.asarray(sigmas), branches, self.guidance, latent, pictures)

    @torch.no_grad()
    def run(self, batch: Batch, plan: Plan | Sequence[Plan]) -> torch.Tensor:
        """The final latents of one plan, or of one for each picture."""
        if isinstance(plan, Halved):
            return self._run_halved(batch, plan)
        sigmas, times = self._schedule(len(batch.sigmas) - 1)
        together = isinstance(plan, Plan)
        plans = [plan] if isinstance(plan, Plan) else list(plan)
        latents = [batch.start] if together else list(batch.start.split(1))
        known: list[dict[int, torch.Tensor]] = [{} for _ in plans]
        for step in range(len(times)):
            due = [n for n, own in enumerate(plans) if step in own.steps]
            if due:
                inputs = batch.inputs if together else batch.inputs_of(due)
                off, on = self._branches(inputs, torch.cat([latents[n] for n in due]), times[step])
                guided = off + self.guidance * (on - off)
                for n, velocity in zip(due, guided.split(len(latents[0]))):
                    known[n][step] = velocity
            for n, own in enumerate(plans):
                given = sum(w * known[n][j] for j, w in own.weights.get(step, ((step, 1.0),)))
                latents[n] = latents[n] + (sigmas[step + 1] - sigmas[step]) * given
        return torch.cat(latents)

    def _run_halved(self, batch: Batch, plan: Halved) -> torch.Tensor:
        """The same for a plan with half steps, where each branch is a call of its own."""
        sigmas, times = self._schedule(len(batch.sigmas) - 1)
        latent = batch.start
        branches: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        known: dict[int, torch.Tensor] = {}
        sides = [
            {name: part.chunk(2)[side] if name in PER_PICTURE else part for name, part in batch.inputs.items()}
            for side in (0, 1)
        ]
        for step, time in enumerate(times):
            action = plan.actions.get(step)
            if action is not None:
                side = ("unconditional", "conditional").index(action)
                found = self._predict(sides[side], latent, time)
                made = sum(w * (branches[j][1] - side * branches[j][0]) for j, w in plan.halves[step])
                known[step] = found + (self.guidance - 1) * made if side else found + self.guidance * (made - found)
            elif step in plan.steps:
                off, on = branches[step] = self._branches(batch.inputs, latent, time)
                known[step] = off + self.guidance * (on - off)
            given = sum(w * known[j] for j, w in plan.weights.get(step, ((step, 1.0),)))
            latent = latent + (sigmas[step + 1] - sigmas[step]) * given
        return latent

    def errors(self, batch: Batch, plan: Plan | None = None, latents: torch.Tensor | None = None) -> torch.Tensor:
        """(B) relative squared errors of final latents, of a plan or given."""
        if latents is None:
            assert plan is not None
            latents = self.run(batch, plan)
        wrong = (latents - batch.final).double().square().flatten(1).mean(1)
        return (wrong / batch.final.double().square().flatten(1).mean(1)).clamp_min(1e-20)

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """(B, 3, H, W) pictures on the CPU, floats from 0 to 1."""
        vae = self.pipe.vae
        grids = self.pipe._unpack_latents(latents, self.height, self.width, self.pipe.vae_scale_factor)
        grids = grids / vae.config.scaling_factor + vae.config.shift_factor
        parts = [vae.decode(part, return_dict=False)[0] for part in grids.split(CHUNK)]
        return (torch.cat(parts) / 2 + 0.5).clamp(0, 1).cpu()

    def _inputs(self, items: Sequence[tuple[str, int]]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        def encoded(prompts: list[str]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            return self.pipe.encode_prompt(
                prompt=prompts, prompt_2=None, device=self.device, max_sequence_length=self.length
            )

        off, off_pooled, text_ids = encoded([DEFAULTS["negative_prompt"]] * len(items))
        on, on_pooled, _ = encoded([prompt for prompt, _ in items])
        channels = self.pipe.transformer.config.in_channels // 4
        shape = (1, channels, self.height, self.width, torch.float32, self.device)
        noises = [self.pipe.prepare_latents(*shape, torch.Generator("cpu").manual_seed(seed)) for _, seed in items]
        inputs = {
            "encoder_hidden_states": torch.cat([off, on]),
            "pooled_projections": torch.cat([off_pooled, on_pooled]),
            "txt_ids": text_ids,
            "img_ids": noises[0][1],
        }
        return inputs, torch.cat([noise for noise, _ in noises])

    def _branches(self, inputs: dict[str, torch.Tensor], latent: torch.Tensor, time: float) -> torch.Tensor:
        """(2, B, S, C) predictions without and with the prompt."""
        return self._predict(inputs, torch.cat([latent, latent]), time).unflatten(0, (2, -1))

    def _predict(self, inputs: dict[str, torch.Tensor], latent: torch.Tensor, time: float) -> torch.Tensor:
        timestep = torch.full((len(latent),), time / 1000, device=latent.device)
        return self.pipe.transformer(
            hidden_states=latent, timestep=timestep, guidance=None, return_dict=False, **inputs
        )[0]

    def _schedule(self, steps: int) -> tuple[list[float], list[float]]:
        self.pipe.scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), device=self.device)
        return self.pipe.scheduler.sigmas.tolist(), self.pipe.scheduler.timesteps.tolist()
