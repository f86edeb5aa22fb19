"""Measure a model folder with plain diffusers: names, layouts, VAE, size, and time on two CPU cores.

    python evaluate.py --model ../../chitu_diffusion/demo/model --json quality.json --cpu-time

How a picture is judged: it is encoded with the model's VAE and compared, by cosine, with the encoded true pictures of
all names on the same background. Before that, the mean over all names is taken away from both sides, because what every
picture shares (the background, the empty margin) says nothing about which object it is. Training moves objects by one
latent cell at most, so the encoded picture is also tried shifted by one cell in each direction and the best counts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from captions import plain_caption
from data import (
    COLOR_NAMES,
    LEFT_OF,
    SINGLE_SCENE,
    SIZE,
    Painter,
    Scenes,
    load_names,
    load_sprites,
    make_scenes,
    random_pairs,
)
from diffusers import DiffusionPipeline

WHITE = COLOR_NAMES.index("white")
LAYOUT_COLORS = [COLOR_NAMES.index(color) for color in ("white", "blue", "green", "yellow", "gray")]
TIMER = """
import sys, time
start = time.perf_counter()
import torch
torch.set_num_threads(2)
from diffusers import DiffusionPipeline
pipe = DiffusionPipeline.from_pretrained(sys.argv[1])
pipe.set_progress_bar_config(disable=True)
call = dict(negative_prompt="", true_cfg_scale=3.0, height=256, width=256, num_inference_steps=28)
loaded = time.perf_counter()
pipe("a red apple on a blue background", max_sequence_length=32, **call)
print("seconds", loaded - start, time.perf_counter() - start)
"""


class Judge:
    """Draws with a pipeline and tells which names its pictures show."""

    def __init__(self, pipe, painter: Painter, names: list[str], options: argparse.Namespace):
        self.pipe, self.painter, self.names, self.options = pipe, painter, names, options
        self.references: dict[tuple, tuple[torch.Tensor, torch.Tensor]] = {}

    def draw(self, captions: list[str]) -> torch.Tensor:
        """Pictures (captions, 3, 256, 256) in -1..1, caption i from seed i."""
        pictures = []
        for start in range(0, len(captions), self.options.batch):
            part = captions[start : start + self.options.batch]
            seeds = range(self.options.seed + start, self.options.seed + start + len(part))
            output = self.pipe(
                part,
                negative_prompt=[""] * len(part),
                true_cfg_scale=self.options.guidance,
                num_inference_steps=self.options.steps,
                height=SIZE,
                width=SIZE,
                max_sequence_length=self.options.text_length,
                generator=[torch.Generator().manual_seed(seed) for seed in seeds],
                output_type="pt",
            ).images
            pictures.append(output.float() * 2 - 1)
        return torch.cat(pictures)

    @torch.no_grad()
    def encode(self, pictures: torch.Tensor) -> torch.Tensor:
        vae = self.pipe.vae
        parts = pictures.to(vae.dtype).split(self.options.batch)
        return torch.cat([vae.encode(part).latent_dist.mode().float() for part in parts])

    def _reference(self, layout: int, half: int, color: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Centred unit vectors of every name at one place on one background, and the mean that was taken away."""
        key = (layout, half, color)
        if key not in self.references:
            count = len(self.names)
            rows = torch.arange(count)
            other = (rows + 1) % count  # stands in the other half, which is cut off
            first, second = (rows, other) if half == 0 else (other, rows)
            scenes = make_scenes(torch.full((count,), layout), first, second, torch.full((count,), color))
            codes = self.encode(cut(self.painter.paint(scenes), layout, half))
            mean = codes.mean(0, keepdim=True)
            self.references[key] = F.normalize((codes - mean).flatten(1), dim=1), mean
        return self.references[key]

    def name(self, picture: torch.Tensor, layout: int, half: int, color: int) -> tuple[int, float]:
        """Nearest name and its cosine for one (3, 256, 256) picture."""
        vectors, mean = self._reference(layout, half, color)
        code = self.encode(cut(picture[None], layout, half))
        moves = [torch.roll(code, (y, x), (2, 3)) for y in (-1, 0, 1) for x in (-1, 0, 1)]
        moved = F.normalize((torch.cat(moves) - mean).flatten(1), dim=1)
        best, row = (moved @ vectors.T).amax(0).max(0)
        return int(row), float(best)


def cut(pictures: torch.Tensor, layout: int, half: int) -> torch.Tensor:
    """The whole of a lone object's picture, or one of the halves of a two-object picture."""
    if layout == SINGLE_SCENE:
        return pictures
    span = slice(half * SIZE // 2, (half + 1) * SIZE // 2)
    return pictures[..., span].contiguous() if layout == LEFT_OF else pictures[..., span, :].contiguous()


def judge_names(judge: Judge, limit: int | None) -> dict:
    """One picture per name on white."""
    rows = list(range(len(judge.names)))[:limit]
    pictures = judge.draw([plain_caption(judge.names, SINGLE_SCENE, row, -1, WHITE) for row in rows])
    found = [judge.name(picture, SINGLE_SCENE, 0, WHITE) for picture in pictures]
    wrong = {judge.names[row]: judge.names[got] for row, (got, _) in zip(rows, found) if got != row}
    cosines = [cosine for _, cosine in found]
    return {
        "pictures": len(rows),
        "right": round(1 - len(wrong) / len(rows), 4),
        "mean_cosine": round(sum(cosines) / len(cosines), 4),
        "wrong": wrong,
    }


def judge_layouts(judge: Judge, count: int) -> dict:
    """Two-object prompts; right only if both halves show the right objects."""
    generator = torch.Generator().manual_seed(judge.options.seed + 777)
    scenes = random_pairs(count, len(judge.names), generator)
    scenes.layout = torch.arange(count) % 2 + LEFT_OF
    scenes.color = torch.tensor(LAYOUT_COLORS)[torch.arange(count) // 2 % len(LAYOUT_COLORS)]
    rows = list(zip(*(c.tolist() for c in (scenes.layout, scenes.first, scenes.second, scenes.color))))
    captions = [plain_caption(judge.names, *row) for row in rows]
    halves, wrong = 0, {}
    for picture, caption, (layout, first, second, color) in zip(judge.draw(captions), captions, rows):
        got = [judge.name(picture, layout, half, color)[0] for half in (0, 1)]
        halves += (got[0] == first) + (got[1] == second)
        if got != [first, second]:
            wrong[caption] = [judge.names[row] for row in got]
    return {
        "pictures": count,
        "right": round(1 - len(wrong) / count, 4),
        "halves_right": round(halves / (2 * count), 4),
        "wrong": wrong,
    }


@torch.no_grad()
def judge_vae(judge: Judge, count: int) -> dict:
    """PSNR of encode-decode on scenes drawn from a seed that training did not use."""
    generator = torch.Generator().manual_seed(987_654)
    pairs = random_pairs(count, len(judge.names), generator)
    lone = random_pairs(count, len(judge.names), generator)
    scenes = make_scenes(torch.zeros(count, dtype=torch.long), lone.first, lone.second, lone.color, generator)
    pictures = judge.painter.paint(Scenes.join([pairs, scenes]))
    vae = judge.pipe.vae
    values = []
    for part in pictures.to(vae.dtype).split(judge.options.batch):
        drawn = vae.decode(vae.encode(part).latent_dist.mode()).sample.clamp(-1, 1)
        values.append(-10 * torch.log10(((drawn - part).float() / 2).square().mean((1, 2, 3))))
    psnr = torch.cat(values)
    pooled = float(-10 * torch.log10((10 ** (-psnr / 10)).mean()))
    return {
        "scenes": 2 * count,
        "psnr_db": round(float(psnr.mean()), 2),
        "psnr_of_mean_error_db": round(pooled, 2),
        "worst_db": round(float(psnr.min()), 2),
    }


def time_on_cpu(model: str) -> dict:
    """Start Python, load, draw one 28-step picture with guidance; a process of its own with two threads."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "2"}
    run = [sys.executable, "-c", TIMER, str(Path(model).resolve())]
    output = subprocess.run(run, env=environment, capture_output=True, text=True, check=True).stdout
    _, load, total = next(line for line in output.splitlines() if line.startswith("seconds")).split()
    return {"load_seconds": round(float(load), 1), "load_and_draw_seconds": round(float(total), 1), "threads": 2}


def save_sheet(judge: Judge, path: str) -> None:
    """A 5 x 4 sheet of varied prompts, to look at."""
    from PIL import Image

    prompts = [
        "a red apple on a blue background",
        "a rocket left of a cat on a green background",
        "a pizza slice above a panda face on a white background",
        "a cat on a yellow background",
        "an owl above a birthday cake on a purple background",
        "a dog left of a bicycle on a pink background",
        "guitar on orange",
        "a picture of a green apple on a red background",
        "a robot face on a black background",
        "a sunflower to the right of a butterfly on a cyan background",
        "an airplane above a house on a blue background",
        "a crown left of a dragon on a gray background",
        "an octopus on a brown background",
        "a hamburger below a castle on a yellow background",
        "Red heart left of purple heart on white",
        "a steam locomotive on a green background",
        "a fox face left of a lion face on a blue background",
        "a violin above a trumpet on a red background",
        "a turtle",
        "a very nice christmas tree on a white background.",
    ]
    pictures = ((judge.draw(prompts).clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).cpu().numpy()
    sheet = Image.new("RGB", (5 * SIZE, 4 * SIZE))
    for at, picture in enumerate(pictures):
        sheet.paste(Image.fromarray(picture), (at % 5 * SIZE, at // 5 * SIZE))
    sheet.save(path)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="model folder")
    parser.add_argument("--json", help="file to write the measurements to")
    parser.add_argument("--sheet", help="PNG file for a sheet of sample pictures")
    parser.add_argument("--sprites", help="npz with `names` and `sprites`, for a machine without the font")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--guidance", type=float, default=3.0)
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--shift", type=float, help="another timestep shift than the folder's")
    parser.add_argument("--text-length", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--limit", type=int, help="judge only so many names")
    parser.add_argument("--layouts", type=int, default=100, help="two-object prompts")
    parser.add_argument("--cpu-time", action="store_true", help="also time one picture on two CPU cores")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    started = time.monotonic()
    pipe = DiffusionPipeline.from_pretrained(options.model).to(options.device)
    pipe.set_progress_bar_config(disable=True)
    if options.shift:
        pipe.scheduler.register_to_config(shift=options.shift)
        pipe.scheduler.set_shift(options.shift)
    names = load_names()
    judge = Judge(pipe, Painter(load_sprites(names, options.sprites), options.device), names, options)
    files = [path for path in Path(options.model).rglob("*") if path.is_file()]
    quality = {
        "device": options.device,
        "steps": options.steps,
        "true_cfg_scale": options.guidance,
        "shift": pipe.scheduler.config.shift,
        "max_sequence_length": options.text_length,
        "seed": options.seed,
        "names": len(names),
        "megabytes": round(sum(path.stat().st_size for path in files) / 1e6, 2),
    }
    if options.sheet:
        save_sheet(judge, options.sheet)
    quality["vae"] = judge_vae(judge, 128 if options.device != "cpu" else 32)
    quality["single"] = judge_names(judge, options.limit)
    if options.layouts:
        quality["layouts"] = judge_layouts(judge, options.layouts)
    if options.cpu_time:
        quality["cpu"] = time_on_cpu(options.model)
    text = json.dumps(quality, indent=2)
    print(text, f"\n[evaluate] {time.monotonic() - started:.0f}s", flush=True)
    if options.json:
        Path(options.json).write_text(text + "\n")


if __name__ == "__main__":
    main()
