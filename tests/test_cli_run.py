"""``chitu run`` on tiny saved pipelines: what it writes, and that it is what plain diffusers makes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_text
import torch
from PIL import Image
from typer.testing import CliRunner, Result

from chitu_diffusion.cli.main import app

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in tiny_text.SIZES:
        tiny_text.save(name, folder / name)
    return folder


def chitu(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def run(models: Path, name: str, *words: object) -> Result:
    return chitu("run", "--model", models / name, *tiny_text.SIZES[name], *words)


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


def test_a_picture_is_that_of_plain_diffusers(models: Path, tmp_path: Path) -> None:
    import diffusers

    out = tmp_path / "new" / "out"
    done = run(models, "flux", "--prompt", "a cat", "--steps", 3, "--guidance", 3, "--seed", 5, "--output", out)
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in out.iterdir()) == [
        "metrics.json",
        "picture-000.png",
        "report.json",
        "request.json",
    ]
    pipe = diffusers.DiffusionPipeline.from_pretrained(models / "flux")
    expected = pipe(
        prompt="a cat", negative_prompt="", true_cfg_scale=3.0, num_inference_steps=3, height=16, width=16,
        max_sequence_length=16, generator=torch.Generator().manual_seed(5),
    ).images[0]  # fmt: skip
    picture = np.asarray(Image.open(out / "picture-000.png"))
    assert picture.std() > 0 and np.array_equal(picture, np.asarray(expected))
    for word in (
        "load",
        "encode",
        "denoise",
        "decode",
        "3 steps",
        "FluxPipeline",
        "transformer/cond: 3 computed",
        str(out),
    ):
        assert word in done.output, word


def test_the_request_hides_nothing(models: Path, tmp_path: Path) -> None:
    words = [
        "--prompt",
        "a cat",
        "--negative-prompt",
        "bad",
        "--steps",
        2,
        "--guidance",
        2.5,
        "--seed",
        9,
        "--num-images",
        2,
    ]
    words += ["--dtype", "bfloat16", "--device", "cpu", "--attention", "sdpa_math", "--cache", "static"]
    words += ["--cache-arg", "steps=0", "--hook-map", ROOT / "adapters/flux.py", "--output", tmp_path / "out"]
    done = run(models, "flux", *words)
    assert done.exit_code == 0, done.output
    request = read(tmp_path / "out", "request.json")
    assert request["given"] == {
        "prompts": ["a cat"], "model": str(models / "flux"), "hook_map": str(ROOT / "adapters/flux.py"),
        "negative_prompt": "bad", "steps": 2, "guidance": 2.5, "height": 16, "width": 16, "num_images": 2,
        "num_frames": None, "fps": None, "seed": 9, "image": None, "mask": None,
        "arguments": {"max_sequence_length": 16},
        "dtype": "bfloat16", "device": "cpu", "require_gpu": False, "attention": "sdpa_math", "cache": "static",
        "cache_args": {"steps": "0"}, "output": str(tmp_path / "out"),
        **dict.fromkeys(("nproc", "cfg_parallel", "ulysses", "ring", "gather", "overlap", "encode_prompt")),
    }  # fmt: skip
    assert request["call"]["placed"]["guidance"] == "true_cfg_scale"
    assert request["call"]["shape"]["tokens"] == 64
    assert "(explicit)" in request["hook_map"]
    assert len(list((tmp_path / "out").glob("*.png"))) == 2


def test_auto_is_written_as_what_it_became(models: Path, tmp_path: Path) -> None:
    run(models, "flux", "--prompt", "a", "--steps", 1, "--output", tmp_path / "out")
    request = read(tmp_path / "out", "request.json")
    assert (request["given"]["device"], request["given"]["dtype"]) == ("auto", "auto")
    assert (request["used"]["device"], request["used"]["dtype"]) == ("cpu", "float32")


def test_a_cache_saves_calls_and_says_so(models: Path, tmp_path: Path) -> None:
    words = ["--prompt", "a cat", "--steps", 4, "--guidance", 3]
    run(models, "flux", *words, "--output", tmp_path / "plain")
    cached = ["--cache", "static", "--cache-arg"]
    half = run(models, "flux", *words, *cached, "steps=0,2", "--output", tmp_path / "half")
    full = run(models, "flux", *words, *cached, "steps=0,1,2,3", "--output", tmp_path / "full")
    assert half.exit_code == full.exit_code == 0, half.output + full.output
    assert "transformer/cond: 2 computed, 2 skipped" in half.output and "FLOPs saved" in half.output
    branches = read(tmp_path / "half", "report.json")["generations"][0]["branches"]
    assert branches["transformer/cond"] == {"computed": 2, "skipped": 2, "replaced": 0}
    plain, halved = (read(tmp_path / name, "metrics.json") for name in ("plain", "half"))
    assert plain["flops"]["full"] == plain["flops"]["spent"] == halved["flops"]["full"] > halved["flops"]["spent"] > 0
    assert plain["steps"] == 4 and plain["peak_memory"] > 2**20
    assert all(seconds > 0 for seconds in plain["seconds"].values())
    pictures = {name: (tmp_path / name / "picture-000.png").read_bytes() for name in ("plain", "half", "full")}
    assert pictures["plain"] == pictures["full"] != pictures["half"]


def test_several_prompts_are_one_call_each(models: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("\ufeffa cat\n\n  a dog  \n", encoding="utf-8")
    words = ["--steps", 1, "--prompts", tmp_path / "prompts.txt", "--prompt", "a cow"]
    assert run(models, "flux", *words, "--output", tmp_path / "all").exit_code == 0
    run(models, "flux", "--steps", 1, "--prompt", "a dog", "--output", tmp_path / "one")
    report = read(tmp_path / "all", "report.json")
    assert [entry["prompt"] for entry in report["files"]] == ["a cow", "a cat", "a dog"]
    assert len(report["generations"]) == 3
    pictures = [(tmp_path / "all" / entry["file"]).read_bytes() for entry in report["files"]]
    assert len(set(pictures)) == 3 and pictures[2] == (tmp_path / "one" / "picture-000.png").read_bytes()


def test_a_clip_comes_out_of_a_video_pipeline(models: Path, tmp_path: Path) -> None:
    done = run(models, "wan", "--prompt", "a cat", "--steps", 2, "--fps", 8, "--output", tmp_path / "out")
    assert done.exit_code == 0, done.output
    (clip,) = (tmp_path / "out").glob("clip-000.*")
    assert clip.stat().st_size > 0
    call = read(tmp_path / "out", "request.json")["call"]
    assert (call["fps"], call["shape"]["frames"], call["arguments"]["num_frames"]) == (8.0, 5, 5)


def test_batched_guidance_goes_to_guidance_scale(models: Path, tmp_path: Path) -> None:
    assert (
        run(models, "sd3", "--prompt", "a", "--steps", 1, "--guidance", 4, "--output", tmp_path / "out").exit_code == 0
    )
    call = read(tmp_path / "out", "request.json")["call"]
    assert call["placed"]["guidance"] == "guidance_scale" and call["arguments"]["guidance_scale"] == 4.0


def test_without_an_output_folder_there_is_a_new_one(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert run(models, "flux", "--prompt", "A cat!", "--steps", 1).exit_code == 0
    found = sorted(path.name for path in (tmp_path / "outputs").iterdir())
    assert len(found) == 2 and all("-a-cat" in name for name in found)


def test_the_embedded_model_brings_its_own_defaults(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from chitu_diffusion import demo

    monkeypatch.setattr(demo, "model_folder", lambda: models / "flux")
    monkeypatch.setitem(demo.DEFAULTS, "steps", 2)
    done = chitu("run", "--prompt", "a cat", "--height", 16, "--width", 16, "--output", tmp_path / "out")
    assert done.exit_code == 0, done.output
    request = read(tmp_path / "out", "request.json")
    assert request["given"]["model"] is request["given"]["steps"] is None
    assert request["used"]["steps"] == 2 and request["used"]["guidance"] == 3.0
    assert request["call"]["arguments"]["max_sequence_length"] == 32
    assert request["call"]["arguments"]["true_cfg_scale"] == 3.0


def _process(*words: object, cwd: Path) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    return subprocess.Popen(
        [sys.executable, *map(str, words)], cwd=cwd, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_leaves_nothing_behind(models: Path, tmp_path: Path, number: int, code: int) -> None:
    words = [
        "--model",
        models / "flux",
        *tiny_text.SIZES["flux"],
        "--prompt",
        "a",
        "--steps",
        100000,
        "--output",
        "deep/out",
    ]
    process = _process("-m", "chitu_diffusion.cli.main", "run", *words, cwd=tmp_path)
    try:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("deep/.out-*.part")):
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()
            time.sleep(0.05)
        time.sleep(3)
        assert process.poll() is None, process.communicate()
        process.send_signal(number)
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == code, error
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_inside_the_process(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from chitu_diffusion.runtime import generator

    def interrupted(*_: Any) -> None:
        assert list(tmp_path.glob(".out-*.part")), "the output folder is being made"
        raise KeyboardInterrupt

    monkeypatch.setattr(generator, "call", interrupted)
    done = run(models, "flux", "--prompt", "a", "--output", tmp_path / "out")
    assert done.exit_code == 130 and list(tmp_path.iterdir()) == []
    assert done.stderr.strip().splitlines() == ["chitu: interrupted; nothing was written"]


def test_a_bug_keeps_its_traceback(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from chitu_diffusion.runtime import generator

    def buggy(*_: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(generator, "call", buggy)
    done = run(models, "flux", "--prompt", "a", "--output", tmp_path / "out")
    assert isinstance(done.exception, ZeroDivisionError)
    assert list(tmp_path.iterdir()) == []
