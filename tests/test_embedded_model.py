"""The embedded model: plain diffusers loads it, the shell draws the same picture, hooks change nothing, caches save."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, FluxPipeline
from PIL import Image
from typer.testing import CliRunner, Result

from chitu_diffusion import Static, patch
from chitu_diffusion.cli.main import app
from chitu_diffusion.demo import DEFAULTS, model_folder

PROMPT = "a red apple on a blue background"
STEPS = 6
BLUE = np.array((70, 130, 225))


@pytest.fixture(scope="module")
def pipe() -> FluxPipeline:
    pipe = DiffusionPipeline.from_pretrained(model_folder())
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe: Any, steps: int = STEPS, prompt: str = PROMPT, **options: Any) -> Any:
    return pipe(
        prompt,
        negative_prompt="",
        true_cfg_scale=3.0,
        height=256,
        width=256,
        num_inference_steps=steps,
        max_sequence_length=32,
        generator=torch.Generator().manual_seed(0),
        **options,
    ).images[0]


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "160"})


def test_the_folder_is_a_plain_diffusers_model(pipe: FluxPipeline) -> None:
    assert type(pipe) is FluxPipeline
    assert sum(path.stat().st_size for path in model_folder().rglob("*") if path.is_file()) <= 50e6
    heads = pipe.transformer.config.num_attention_heads
    assert heads % 8 == 0, "2, 4 and 8 ranks are to divide the heads"


def test_it_draws_what_it_is_asked_for(pipe: FluxPipeline) -> None:
    """A red thing in the middle of a blue picture; the measured quality is in ChituBench/demo_model/quality.json."""
    picture = np.asarray(draw(pipe)).astype(int)
    border = np.concatenate([picture[:12].reshape(-1, 3), picture[-12:].reshape(-1, 3)])
    assert np.abs(border.mean(0) - BLUE).max() < 30
    red, green, blue = picture[96:176, 96:176].reshape(-1, 3).mean(0)
    assert red > 150 and red > 2 * green and red > 2 * blue


def test_the_shell_draws_what_plain_diffusers_draws(pipe: FluxPipeline, tmp_path: Path) -> None:
    done = run("run", "--prompt", PROMPT, "--steps", STEPS, "--output", tmp_path / "out")
    assert done.exit_code == 0, done.output
    drawn = np.asarray(Image.open(tmp_path / "out" / "picture-000.png"))
    assert np.array_equal(drawn, np.asarray(draw(pipe)))
    used = json.loads((tmp_path / "out" / "request.json").read_text())["used"]
    assert (used["guidance"], used["height"], used["steps"]) == (DEFAULTS["guidance"], DEFAULTS["height"], STEPS)


def test_a_cache_at_half_the_steps_hits_and_at_all_steps_changes_nothing(pipe: FluxPipeline) -> None:
    stock = draw(pipe, output_type="latent")
    with patch(pipe, cache=Static(steps=range(STEPS))):
        assert torch.equal(draw(pipe, output_type="latent"), stock)
    with patch(pipe, cache=Static(steps=(0, 1, 3))) as handle:
        cached = draw(pipe, output_type="latent")
    report = handle.report()
    assert report.branches == {
        f"transformer/{name}": {"computed": 3, "skipped": 3, "replaced": 0} for name in ("cond", "uncond")
    }
    flops = report.features[0]["flops"]
    assert 0.45 * flops["full"] < flops["saved"] < 0.5 * flops["full"]
    assert not torch.equal(cached, stock)
    assert torch.equal(draw(pipe, output_type="latent"), stock), "undone"


def test_verify_finds_no_difference() -> None:
    done = run("verify", "--prompt", PROMPT, "--steps", 2)
    assert done.exit_code == 0, done.output
    assert "largest difference 0; after undo: equal again" in done.output


def test_the_stored_quality_is_of_these_weights() -> None:
    quality = json.loads((Path(__file__).parent.parent / "ChituBench" / "demo_model" / "quality.json").read_text())
    assert quality["names"] >= 200
    assert quality["single"]["right"] >= 0.9
    assert quality["vae"]["psnr_db"] >= 30
    assert quality["cpu"]["load_and_draw_seconds"] <= 30
