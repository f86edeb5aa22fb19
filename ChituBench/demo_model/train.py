"""Train the embedded emoji model: first its VAE, then its text encoders and transformer together, on one GPU.

    python train.py --out model                  # about 17 minutes on one NVIDIA H200
    python train.py --out /tmp/smoke --smoke     # a dry run on a CPU: tiny sizes, a few steps, useless pictures

Both stages are given seconds, not steps: learning rates follow the fraction of time gone by.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from captions import ROLES, CaptionJob, caption_words
from data import (
    COLORS,
    Painter,
    Scenes,
    all_singles,
    load_names,
    load_sprites,
    random_pairs,
)
from diffusers import AutoencoderKL, FluxPipeline
from model import (
    SHIFT,
    SIZES,
    TEXT_LENGTH,
    build_clip_tokenizer,
    build_t5_tokenizer,
    build_text_encoders,
    build_transformer,
    save_folder,
)
from optimizer import Average, Muon, transformer_matrices
from schedule import Clock, set_rates
from torch import nn
from train_vae import train_vae
from transformers import CLIPTextModel, T5EncoderModel


def pack(latents: torch.Tensor) -> torch.Tensor:
    """(batch, 16, 32, 32) latents to (batch, 256, 64) tokens, as FluxPipeline packs them."""
    return FluxPipeline._pack_latents(latents, *latents.shape)


def make_pool(painter: Painter, vae: AutoencoderKL, scenes: Scenes, batch: int) -> torch.Tensor:
    """Scaled latents of all scenes, (scenes, 16, 32, 32) in bfloat16 on the device: encoded once, used many times."""
    pool = torch.empty(len(scenes), 16, 32, 32, dtype=torch.bfloat16, device=painter.device)
    shift, scale = vae.config.shift_factor, vae.config.scaling_factor
    cuda = painter.device.type == "cuda"
    with torch.no_grad(), torch.autocast(painter.device.type, torch.bfloat16, enabled=cuda):
        for start in range(0, len(scenes), batch):
            pictures = painter.paint(scenes[slice(start, start + batch)]).contiguous(memory_format=torch.channels_last)
            pool[start : start + batch] = (vae.encode(pictures).latent_dist.mode().float() - shift) * scale
    return pool


def draw_noise_levels(count: int, device: torch.device, near_one: float) -> torch.Tensor:
    """Noise levels in 0..1: logit-normal, shifted as the scheduler shifts its steps, with some drawn evenly so that both
    ends are seen too. A share `near_one` is drawn from 0.93..1, where it is decided which object goes where."""
    levels = torch.sigmoid(torch.randn(count, device=device) + math.log(SHIFT))
    levels = torch.where(torch.rand(count, device=device) < 0.15, torch.rand(count, device=device), levels)
    return torch.where(
        torch.rand(count, device=device) < near_one, 0.93 + 0.07 * torch.rand(count, device=device), levels
    )


def build_parts(options: argparse.Namespace, names: list[str], device: torch.device):
    """Tokenizers, text encoders and transformer: new ones, or those of a folder to go on from."""
    if options.resume:
        pipe = FluxPipeline.from_pretrained(options.resume, torch_dtype=torch.float32)
        return (pipe.tokenizer_2, pipe.tokenizer), [
            part.float().to(device).train().requires_grad_(True)
            for part in (pipe.text_encoder_2, pipe.text_encoder, pipe.transformer)
        ]
    torch.manual_seed(options.seed)
    words = caption_words(names)
    tokenizers = build_t5_tokenizer(words), build_clip_tokenizer(words)
    t5, clip = build_text_encoders(SIZES[options.size], *tokenizers)
    if options.text:
        t5 = T5EncoderModel.from_pretrained(options.text, subfolder="text_encoder_2", dtype=torch.float32)
        clip = CLIPTextModel.from_pretrained(options.text, subfolder="text_encoder", dtype=torch.float32)
    transformer = build_transformer(SIZES[options.size])
    return tokenizers, [part.to(device).train() for part in (t5, clip, transformer)]


def make_scene_list(objects: int, options: argparse.Namespace) -> tuple[int, Scenes]:
    """All scenes of the pool: every single-object scene first, and how many those are, then two-object scenes."""
    generator = torch.Generator().manual_seed(options.seed + 1)
    singles, pairs = all_singles(objects), random_pairs(options.pairs, objects, generator)
    if options.smoke:
        singles = singles[:: 9 * len(COLORS)]
    return len(singles), Scenes.join([singles, pairs])


class OrderProbe:
    """Whether pure noise already turns into the objects at the places that the caption names: of a batch of two-object
    scenes, the share whose first prediction is nearer to the scene than to the same scene with its objects exchanged."""

    def __init__(self, painter: Painter, vae: AutoencoderKL, scenes: Scenes, first: int, count: int, batch: int):
        self.rows = torch.arange(first, first + count, device=painter.device)
        shown = scenes[slice(first, first + count)]
        exchanged = Scenes(shown.layout, shown.second, shown.first, shown.color, shown.corners)
        self.right, self.exchanged = (pack(make_pool(painter, vae, part, batch).float()) for part in (shown, exchanged))

    def share(self, predicted: torch.Tensor) -> float:
        """Args: predicted: latents (count, 256, 64) predicted from noise."""
        near, far = ((predicted - other).pow(2).mean((1, 2)) for other in (self.right, self.exchanged))
        return float((near < far).float().mean())


def train_transformer(
    painter: Painter,
    vae: AutoencoderKL,
    names: list[str],
    singles: int,
    scenes: Scenes,
    captions: CaptionJob,
    options: argparse.Namespace,
) -> None:
    """Rectified flow on pooled latents with the text encoders learning along. Writes the folder at the end, and keeps
    a checkpoint on the way so that a broken run still leaves something."""
    device = painter.device
    cuda = device.type == "cuda"
    rng = random.Random(options.seed)
    tokenizers, parts = build_parts(options, names, device)
    t5, clip, transformer = parts
    started = time.monotonic()
    pool = make_pool(painter, vae, scenes, options.encode_batch)
    captions = [column.to(device) for column in captions.result()]
    empty = len(captions[0]) - 1
    probe = OrderProbe(painter, vae, scenes, singles, options.batch, options.encode_batch)
    mean, spread = float(pool.float().mean()), float(pool.float().std())
    print(f"[pool] {len(pool)} scenes in {time.monotonic() - started:.0f}s; {mean=:.3f} {spread=:.3f}", flush=True)
    if not options.smoke and not (abs(mean) < 0.2 and 0.8 < spread < 1.25):
        raise RuntimeError("latents are not scaled to unit variance")

    # Without a push, the text encoder stays a bag of words for thousands of steps: both names are drawn, but which one
    # stands where is left to chance. So it also learns, by this head, to tell where each named object goes.
    role_head = nn.Linear(t5.config.d_model, len(ROLES)).to(device)
    matrices = transformer_matrices(transformer)
    inside = {id(param) for param in matrices}
    texts = [param for part in (t5, clip) for param in part.parameters()]
    others = [param for param in transformer.parameters() if id(param) not in inside] + list(role_head.parameters())
    muon = Muon(matrices, lr=options.muon_rate)
    text_rate = options.adam_rate * options.text_rate
    adam = torch.optim.AdamW(
        [{"params": others}, {"params": texts, "lr": text_rate}],
        lr=options.adam_rate,
        betas=(0.9, 0.99),
        weight_decay=0.0,
        fused=cuda,
    )
    others += texts
    average = Average(parts, options.decay)
    if cuda:
        transformer.compile_repeated_blocks(dynamic=False)
    position = FluxPipeline._prepare_latent_image_ids(1, 16, 16, device, torch.float32)

    def predict(noisy, level, t5_ids, clip_ids):
        """Velocity and text features, in one type and shape of call, so that nothing is compiled twice."""
        with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
            words = t5(t5_ids)[0]
            velocity = transformer(
                hidden_states=noisy,
                timestep=level,
                encoder_hidden_states=words,
                pooled_projections=clip(clip_ids).pooler_output,
                txt_ids=torch.zeros(t5_ids.shape[1], 3, device=device),
                img_ids=position,
                return_dict=False,
            )[0]
        return velocity.float(), words

    torch.manual_seed(options.seed + 2)
    batch, lone = options.batch, round(options.batch * options.single_share)
    clock = Clock("flow", options.flow_seconds, options.log_every)
    saved = 0.0
    while clock.fraction < 1:
        done = clock.fraction
        set_rates([muon, adam], min(1.0, (clock.step + 1) / 200) * min(1.0, (1 - done) / options.cooldown))
        # FLUX attends to padding, so a few steps see the pipeline's default length instead of the recommended one
        length = 512 if rng.random() < options.long_text else TEXT_LENGTH
        rows = torch.cat(
            [
                torch.randint(singles, (lone,), device=device),
                torch.randint(singles, len(scenes), (batch - lone,), device=device),
            ]
        )
        texts = rows * options.variants + torch.randint(options.variants, (batch,), device=device)
        texts = torch.where(torch.rand(batch, device=device) < 0.1, empty, texts)
        t5_ids, clip_ids, roles = (column[texts].long() for column in captions)
        t5_ids = F.pad(t5_ids, (0, length - TEXT_LENGTH), value=tokenizers[0].pad_token_id)
        clean = pack(pool[rows].float())
        noise = torch.randn_like(clean)
        level = draw_noise_levels(batch, device, options.near_one)
        velocity, words = predict(torch.lerp(clean, noise, level[:, None, None]), level, t5_ids, clip_ids)
        guesses = role_head(words[:, :TEXT_LENGTH].float())
        flow = F.mse_loss(velocity, noise - clean)
        role = F.cross_entropy(guesses.flatten(0, 1), roles.flatten())
        loss = flow + options.role_weight * role
        muon.zero_grad()
        adam.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(others, 1.0)
        muon.step()
        adam.step()
        average.update()
        means = clock.tick(loss=flow, role=role)
        if means:
            texts = probe.rows * options.variants
            velocity, _ = predict(noise, torch.ones_like(level), *(column[texts].long() for column in captions[:2]))
            print(f"[flow] order right at pure noise: {probe.share((noise - velocity).detach()):.3f}", flush=True)
        if means and clock.fraction > 0.2 and not options.smoke and means["loss"] > 1.0:
            raise RuntimeError("the transformer does not learn")
        if means and clock.fraction - saved > 0.2:
            saved = clock.fraction
            average.swap()
            torch.save(
                [{k: v.half() for k, v in part.state_dict().items()} for part in parts], f"{options.out}.part.pt"
            )
            average.swap()
    print(f"[flow] {clock.step} steps of {options.batch} pictures", flush=True)
    average.swap()
    save_folder(options.out, vae, transformer, t5, clip, *tokenizers)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="folder to write the model to")
    parser.add_argument("--stages", choices=["all", "vae", "flow"], default="all")
    parser.add_argument("--vae", help="folder of a trained VAE (needed for --stages flow)")
    parser.add_argument("--resume", help="model folder whose transformer and text encoders to go on from")
    parser.add_argument("--text", help="model folder whose text encoders to start from, under a new transformer")
    parser.add_argument("--sprites", help="npz with `names` and `sprites`, for a machine without the font")
    parser.add_argument("--smoke", action="store_true", help="dry run with tiny sizes")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vae-seconds", type=float, default=260)
    parser.add_argument("--flow-seconds", type=float, default=680)
    parser.add_argument("--vae-batch", type=int, default=32)
    parser.add_argument("--encode-batch", type=int, default=256)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=120_000, help="two-object scenes in the pool")
    parser.add_argument("--variants", type=int, default=3, help="phrasings of each scene")
    parser.add_argument("--single-share", type=float, default=0.5)
    parser.add_argument("--kl", type=float, default=1e-4)
    parser.add_argument("--muon-rate", type=float, default=0.01)
    parser.add_argument("--adam-rate", type=float, default=1e-3)
    parser.add_argument("--text-rate", type=float, default=1.0, help="the text encoders' share of --adam-rate")
    parser.add_argument("--role-weight", type=float, default=0.1)
    parser.add_argument("--near-one", type=float, default=0.0, help="share of noise levels drawn from 0.93 to 1")
    parser.add_argument("--long-text", type=float, default=0.05, help="share of steps with text padded to 512 tokens")
    parser.add_argument("--cooldown", type=float, default=0.5, help="final part of the time in which rates fall to 0")
    parser.add_argument("--decay", type=float, default=0.999)
    parser.add_argument("--workers", type=int, default=5, help="processes that tokenize captions; 0 for none")
    parser.add_argument("--log-every", type=float, default=10)
    options = parser.parse_args()
    options.size = "smoke" if options.smoke else "full"
    if options.smoke:
        options.vae_seconds, options.flow_seconds, options.log_every = 8, 15, 3
        options.workers = 0 if options.workers == 5 else options.workers
        options.vae_batch, options.encode_batch, options.batch, options.pairs = 4, 16, 8, 64
    return options


def main() -> None:
    options = parse_options()
    torch.manual_seed(options.seed)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.enable_cudnn_sdp(False)  # its backward pass fails at these shapes
    torch._dynamo.config.suppress_errors = True  # run a block uncompiled rather than stop
    names = load_names()
    painter = Painter(load_sprites(names, options.sprites), torch.device(options.device))
    Path(options.out).mkdir(parents=True, exist_ok=True)
    singles, scenes = make_scene_list(len(names), options)
    captions = CaptionJob(scenes, names, options.variants, options.seed, options.workers)
    if options.stages == "flow":
        vae = AutoencoderKL.from_pretrained(options.vae, torch_dtype=torch.float32).to(painter.device)
        vae.eval().requires_grad_(False)
    else:
        vae = train_vae(painter, len(names), options)
        vae.save_pretrained(f"{options.out}/vae")
    if options.stages != "vae":
        train_transformer(painter, vae, names, singles, scenes, captions, options)


if __name__ == "__main__":
    main()
