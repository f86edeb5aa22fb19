"""``chitu verify``: 0 for a sound pipeline, 1 for a deliberately broken hook, and a word on what is on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_text
import torch
from typer.testing import CliRunner, Result

from chitu_diffusion import patch
from chitu_diffusion.cli.main import app
from chitu_diffusion.evaluation.parity import Probe, compare, largest_difference, make_probe, record


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in tiny_text.SIZES:
        tiny_text.save(name, folder / name)
    return folder


def verify(models: Path, name: str, *words: object) -> Result:
    given = ["verify", models / name, *tiny_text.SIZES[name], "--steps", 2, *words]
    return CliRunner().invoke(app, [str(word) for word in given], env={"COLUMNS": "160"})


@pytest.mark.parametrize(("name", "guided"), [("flux", ["--guidance", 3]), ("sd3", []), ("wan", [])])
def test_a_sound_pipeline_differs_nowhere(models: Path, name: str, guided: list[Any]) -> None:
    done = verify(models, name, *guided)
    assert done.exit_code == 0, done.output
    assert "largest difference 0; after undo: equal again" in done.output
    rows = [line.split() for line in done.output.splitlines() if line.startswith(("transformer", "output"))]
    kinds = {row[1] for row in rows}
    assert kinds == {"denoiser", "stack", "block", "attention", "output"}
    assert all(row[-1] == "0" and int(row[2]) > 0 for row in rows)
    branches = 1 if name == "sd3" else 2
    assert rows[0][:3] == ["transformer", "denoiser", str(2 * branches)]
    seams = next(line for line in done.output.splitlines() if line.startswith("calls at the seams"))
    assert all(f"{seam} " in seams and f"{seam} 0" not in seams for seam in ("clock", "denoiser", "block", "attention"))


BREAKS: dict[str, tuple[str, Any, str]] = {
    "attention": ("attention", lambda self, q, k, v, ctx: ctx.next(q, k, v) * 1.001, "sites differ"),
    "block": ("block_out", lambda self, call, block, out: {role: t + 1e-3 for role, t in out.items()}, "sites differ"),
    "denoiser": ("denoiser_out", lambda self, call: setattr(call, "sample", call.sample + 1e-3), "sites differ"),
    "step": ("step_out", lambda self, step: setattr(step, "next_sample", step.next_sample * 1.01), "sites differ"),
}


@pytest.mark.parametrize("seam", BREAKS)
def test_a_broken_hook_is_found(models: Path, seam: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method, broken, message = BREAKS[seam]
    sound = getattr(Probe, method)

    def counted_and_broken(self: Probe, *args: Any) -> Any:
        sound(self, *args)
        return broken(self, *args)

    monkeypatch.setattr(Probe, method, counted_and_broken)
    done = verify(models, "flux")
    assert done.exit_code == 1, done.output
    assert "FAILED: hooked with nothing on" in done.output and message in done.output
    assert "FAILED: after undo" not in done.output


def test_a_hook_that_never_acts_is_found(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from chitu_hooks.block import BlockSeam

    monkeypatch.setattr(BlockSeam, "enter", lambda self, block, rest, args, kwargs: rest(*args, **kwargs))
    done = verify(models, "flux")
    assert done.exit_code == 1 and "FAILED: the block seam was put in place and not called" in done.output


def test_an_undo_that_does_not_undo_is_found(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from chitu_hooks import Handle

    undo = Handle.undo

    def leaves_a_trace(self: Handle) -> None:
        undo(self)
        if any(isinstance(feature, Probe) for feature in self.features):
            self.pipe.transformer.proj_out.bias.data += 0.1

    monkeypatch.setattr(Handle, "undo", leaves_a_trace)
    done = verify(models, "flux")
    assert done.exit_code == 1 and "FAILED: after undo" in done.output


def test_features_say_what_they_declare_and_what_was_measured(models: Path) -> None:
    done = verify(
        models, "flux", "--steps", 4, "--cache", "static", "--cache-arg", "steps=0,2", "--attention", "sdpa_math"
    )
    assert done.exit_code == 0, done.output
    assert "lossy" in done.output and "close" in done.output and "hits 2" in done.output
    assert "measured against the unhooked run: largest difference" in done.output and "dB" in done.output


def test_a_cache_that_skips_nothing_changes_nothing(models: Path) -> None:
    done = verify(models, "flux", "--cache", "static", "--cache-arg", "steps=0,1")
    assert done.exit_code == 0 and "not a bit differs" in done.output, done.output


@pytest.mark.parametrize("name", tiny.TINY)
def test_every_tiny_pipeline_is_equal_at_every_site(name: str) -> None:
    pipe = tiny.build(name)
    sites_of = patch(pipe)
    sites = sites_of.sites
    sites_of.undo()

    def run() -> Any:
        return pipe(**tiny.call_arguments(name, steps=3))[0]

    reference = record(sites, run)
    probe = Probe()
    with patch(pipe, features=(probe,)):
        rows = compare(sites, run, reference)
    assert probe.idle(sites) == []
    assert {row.kind for row in rows} == {"denoiser", "stack", "block", "attention", "output"}
    assert [row for row in rows if not row.equal] == []
    assert all(row.calls for row in rows)
    assert not any(module._forward_hooks for module in pipe.transformer.modules()), "the recorder leaves no hook"


def test_differences() -> None:
    one = torch.tensor([1.0, float("nan"), float("inf")])
    assert largest_difference([one], [one.clone()]) == 0
    assert largest_difference([one], [torch.tensor([1.5, float("nan"), float("inf")])]) == 0.5
    assert largest_difference([one], [torch.tensor([1.0, 2.0, float("inf")])]) == float("inf")
    assert largest_difference([one], [one[:2]]) == float("inf") == largest_difference([one], [])


def test_a_unet_is_probed_without_its_trunk() -> None:
    import diffusers

    unet = diffusers.UNet2DConditionModel(
        sample_size=8, block_out_channels=(8, 16), layers_per_block=1, cross_attention_dim=16, attention_head_dim=2,
        norm_num_groups=2, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    parts = dict.fromkeys(("text_encoder", "tokenizer", "safety_checker", "feature_extractor"))
    pipe = diffusers.StableDiffusionPipeline(
        vae=tiny.kl_vae(4), unet=unet, scheduler=diffusers.DDIMScheduler(), requires_safety_checker=False, **parts
    )
    pipe.set_progress_bar_config(disable=True)
    embeds = torch.randn(1, 6, 16, generator=tiny.noise(3))

    def run() -> Any:
        given = {"prompt_embeds": embeds, "negative_prompt_embeds": -embeds, "num_inference_steps": 3}
        return pipe(**given, height=8, width=8, generator=tiny.noise(), output_type="latent")[0]

    with patch(pipe) as handle:
        sites = handle.sites
    reference = record(sites, run)
    probe = make_probe(sites)
    with patch(pipe, features=(probe,)):
        rows = compare(sites, run, reference)
    assert probe.idle(sites) == [] and probe.calls["attention"] > 0 and "block_in" not in probe.calls
    assert {row.kind for row in rows} == {"denoiser", "attention", "output"}
    assert [row for row in rows if not row.equal] == []
