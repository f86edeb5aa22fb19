"""First stage: an autoencoder that makes 16 x 32 x 32 latents of 256 x 256 scenes."""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from data import PAIR, SINGLE, SIZE, STEP, Painter, random_pairs
from diffusers import AutoencoderKL
from model import SIZES, build_vae
from optimizer import Average
from schedule import Clock, set_rates
from torch import nn


def edges(pictures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return pictures[..., 1:, :] - pictures[..., :-1, :], pictures[..., 1:] - pictures[..., :-1]


def vae_batch(painter: Painter, objects: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """Pictures to learn the VAE on: the scenes that captions describe, a third of them off the grid and the palette."""
    pairs = random_pairs(count, objects, generator)
    pairs.layout[torch.rand(count, generator=generator) < 0.5] = 0
    fills = painter.palette[pairs.color.to(painter.device)]
    loose = torch.rand(count, generator=generator) < 0.33
    lone = (pairs.layout == 0)[:, None, None]
    moved = pairs.corners + torch.randint(-STEP, STEP, pairs.corners.shape, generator=generator)
    pairs.corners = torch.where(lone, torch.randint(24, 57, pairs.corners.shape, generator=generator), pairs.corners)
    low = torch.where(loose[:, None, None] & ~lone, moved, pairs.corners).clamp(0)
    pairs.corners = torch.minimum(low, torch.where(lone, SIZE - SINGLE, SIZE - PAIR))
    random_fills = torch.rand(count, 3, generator=generator).to(painter.device)
    return painter.paint(pairs, torch.where(loose.to(painter.device)[:, None], random_fills, fills))


def train_vae(painter: Painter, objects: int, options: argparse.Namespace) -> AutoencoderKL:
    """Pixel, edge and a small KL loss. Ends with the latents' measured mean and spread in the config."""
    device = painter.device
    cuda = device.type == "cuda"
    generator = torch.Generator().manual_seed(options.seed)
    vae = build_vae(SIZES[options.size]).to(device, memory_format=torch.channels_last)
    with torch.no_grad():
        vae.encoder.conv_out.bias[16:] = -4.0  # start with little latent noise, or early steps see only noise
    encoder, decoder = vae.encoder, vae.decoder
    if cuda:
        encoder, decoder = torch.compile(encoder), torch.compile(decoder)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=1.5e-3, betas=(0.9, 0.98), weight_decay=0.0, fused=cuda)
    average = Average([vae], 0.999)
    clock = Clock("vae", options.vae_seconds, options.log_every)
    while clock.fraction < 1:
        done = clock.fraction
        set_rates([optimizer], min(1.0, (clock.step + 1) / 100) * min(1.0, (1 - done) / 0.6))
        pictures = vae_batch(painter, objects, options.vae_batch, generator)
        pictures = pictures.contiguous(memory_format=torch.channels_last)
        with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
            mean, log_variance = encoder(pictures).float().chunk(2, 1)
            log_variance = log_variance.clamp(-20, 10)
            latents = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
            drawn = decoder(latents.contiguous(memory_format=torch.channels_last)).float()
        pixel = F.l1_loss(drawn, pictures)
        edge = sum(F.l1_loss(a, b) for a, b in zip(edges(drawn), edges(pictures)))
        kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
        square = F.mse_loss(drawn, pictures)
        # Edges are mostly flat, so an edge loss alone is happy with no picture at all: let it in once colours are right.
        loss = 2 * square + 0.5 * pixel + 0.25 * min(1.0, max(0.0, 2 * done - 0.8)) * edge + options.kl * kl
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        average.update()
        means = clock.tick(l1=pixel, edge=edge, kl=kl, db=-10 * torch.log10(square.detach() / 4))  # as if 0..1
        if means and clock.fraction > 0.6 and not options.smoke and means["db"] < 18:
            raise RuntimeError("the VAE does not learn")
    average.swap()
    vae.eval().requires_grad_(False)
    with torch.no_grad():
        latents = vae.encode(vae_batch(painter, objects, min(256, 4 * options.vae_batch), generator)).latent_dist.mode()
    shift, spread = float(latents.mean()), float(latents.std())
    vae.register_to_config(shift_factor=round(shift, 4), scaling_factor=round(1 / spread, 4))
    channels = ", ".join(f"{s:.2f}" for s in (latents - shift).div(spread).std((0, 2, 3)).tolist())
    print(f"[vae] {clock.step} steps; latent mean {shift:.3f} spread {spread:.3f}; by channel {channels}", flush=True)
    return vae
