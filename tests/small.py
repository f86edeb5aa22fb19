"""Python files that build a small pipeline: what a user hands to ``chitu inspect`` and ``chitu adapt``."""

from __future__ import annotations

from pathlib import Path

OVIS = """\
import diffusers
import torch


def build():
    torch.manual_seed(0)
    transformer = diffusers.OvisImageTransformer2DModel(
        in_channels=16, out_channels=16, num_layers=2, num_single_layers=3, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, axes_dims_rope=(4, 4, 8),
    )
    vae = diffusers.AutoencoderKL(block_out_channels=(4,), latent_channels=4, norm_num_groups=1)
    return diffusers.OvisImagePipeline(diffusers.FlowMatchEulerDiscreteScheduler(), vae, None, None, transformer)
"""
CALL = """

def call(pipe):
    noise = torch.Generator().manual_seed(0)
    text = torch.randn(2, 20, 32, generator=noise)
    return pipe(
        prompt_embeds=text[:1], negative_prompt_embeds=text[1:], negative_prompt=None, height=16, width=32,
        num_inference_steps=3, generator=noise, output_type="latent",
    )
"""

ODD = '''\
import copy

import diffusers
import torch
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor


class Refiner(torch.nn.Module):
    def forward(self, x):
        return x


class Slow(FluxAttnProcessor):
    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None):
        query, key = attn.to_q(hidden_states), attn.to_k(hidden_states)
        weights = torch.bmm(query, key.transpose(1, 2)).softmax(-1)
        return torch.bmm(weights, attn.to_v(hidden_states))


class OddPipeline(diffusers.DiffusionPipeline):
    def __init__(self, transformer, scheduler, vae, refiner, vocoder):
        self.register_modules(transformer=transformer, scheduler=scheduler, vae=vae, refiner=refiner, vocoder=vocoder)

    @property
    def interrupt(self):
        return False

    def check_inputs(self, steps):
        # a comment, which is no line of code

        if steps < 1:
            raise ValueError("too few steps")

    def reordered(self, x):
        """A docstring, which is none either."""
        return x.permute(0, 2, 1)

    def prepared(self, steps):
        return torch.randn(1, 4, steps)

    def __call__(self, steps=2):
        self.check_inputs(steps)
        latents = self.prepared(steps)
        self.scheduler.set_timesteps(steps)
        other = copy.deepcopy(self.scheduler)
        other_scheduler = other
        for t in self.scheduler.timesteps:
            noise_pred = self.transformer(latents, t)[0]
            noise_pred = self.refiner(
                noise_pred
            )
            noise_pred = noise_pred.permute(0, 2, 1)
            noise_pred = self.reordered(noise_pred)
            latents = self.scheduler.scale_noise(latents, t)
            latents = other_scheduler.step(noise_pred, t, latents)[0]
            latents = self.scheduler.step(noise_pred, t, latents)[0]
        frames = [self.vae.decode(frame)[0] for frame in latents]
        for frame in latents:
            frames.append(self.vae.decode(frame)[0])
        return self.vocoder(frames)


def build():
    torch.manual_seed(0)
    transformer = diffusers.FluxTransformer2DModel(
        in_channels=4, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
    )
    transformer.transformer_blocks[1].attn.processor = Slow()
    transformer.single_transformer_blocks[0].norm.linear = torch.nn.Conv1d(32, 96, 3)
    vae = diffusers.AutoencoderKL(block_out_channels=(4,), latent_channels=4, norm_num_groups=1)
    return OddPipeline(transformer, diffusers.FlowMatchEulerDiscreteScheduler(), vae, Refiner(), Refiner())
'''
"""A pipeline of which the seams do not reach much, and whose every piece is known."""


def write(folder: Path, text: str, name: str = "small.py") -> Path:
    """Write one of the above into `folder`."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path
