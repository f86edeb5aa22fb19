"""Model folders: whole ones load, broken ones are told in one sentence before anything is read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_text
import torch

from chitu_diffusion.runtime import LoadError
from chitu_diffusion.runtime.loading import check_folder, load_pipeline, model_source, pick_device, pick_dtype


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_text.save("flux", tmp_path_factory.mktemp("models") / "flux")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "flux"))


WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


def cut(folder: Path) -> None:
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:-100])


def cut_header(folder: Path) -> None:
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:40])


def shards(folder: Path) -> None:
    index = {
        "weight_map": {"a": "diffusion_pytorch_model.safetensors", "b": "part-2.safetensors", "c": "part-3.safetensors"}
    }
    (folder / "transformer/diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))


def unknown_class(folder: Path) -> None:
    path = folder / "model_index.json"
    path.write_text(path.read_text().replace("FluxPipeline", "FluxTwelvePipeline"))


BREAKS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no index": (lambda f: (f / "model_index.json").unlink(), "no model_index.json"),
    "index is cut": (lambda f: (f / "model_index.json").write_text("{"), "cannot be read"),
    "index is a list": (lambda f: (f / "model_index.json").write_text("[]"), "no list of components"),
    "no component": (lambda f: shutil.rmtree(f / "vae"), r"half downloaded: there is nothing in vae/, .*AutoencoderKL"),
    "empty component": (lambda f: [p.unlink() for p in (f / "vae").iterdir()], "nothing in vae/"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "transformer/ has no weights"),
    "no text weights": (lambda f: (f / "text_encoder/model.safetensors").unlink(), "text_encoder/ has no weights"),
    "empty weights": (lambda f: (f / WEIGHTS).write_bytes(b""), f"{WEIGHTS} is empty"),
    "cut weights": (cut, rf"{WEIGHTS} has \d+ of \d+ bytes"),
    "cut header": (cut_header, f"{WEIGHTS} has no readable header"),
    "missing shards": (shards, r"2 of 3 weight files of transformer/ are missing \(part-2.safetensors is the first\)"),
    "part of a file": (
        lambda f: (f / "vae/x.safetensors.incomplete").write_text("x"),
        "x.safetensors.incomplete is a part",
    ),
    "lfs pointer": (
        lambda f: (f / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\n"),
        "Git LFS pointer",
    ),
    "no scheduler config": (
        lambda f: (f / "scheduler/scheduler_config.json").rename(f / "scheduler/readme.txt"),
        "scheduler/ has no configuration",
    ),
}


@pytest.mark.parametrize("how", BREAKS)
def test_a_half_downloaded_folder_is_told(folder: Path, how: str) -> None:
    check_folder(folder)
    breaking, message = BREAKS[how]
    breaking(folder)
    with pytest.raises(LoadError, match=message) as caught:
        model_source(str(folder))
    assert "\n" not in str(caught.value)


def test_a_whole_folder_loads(whole: Path) -> None:
    source = model_source(str(whole))
    pipe = load_pipeline(source, dtype=torch.bfloat16, device="cpu")
    assert type(pipe).__name__ == "FluxPipeline" and pipe.transformer.dtype == torch.bfloat16


def test_a_class_that_diffusers_does_not_have(folder: Path) -> None:
    unknown_class(folder)
    with pytest.raises(LoadError, match=r"FluxTwelvePipeline, which diffusers .* does not have"):
        load_pipeline(model_source(str(folder)), dtype=torch.float32, device="cpu")


def test_a_file_that_diffusers_cannot_read(folder: Path) -> None:
    (folder / "vae/config.json").write_text('{"_class_name": "AutoencoderKL", "act_fn": 3')
    with pytest.raises(LoadError):
        load_pipeline(model_source(str(folder)), dtype=torch.float32, device="cpu")


def test_a_missing_folder_names_its_neighbours(whole: Path) -> None:
    with pytest.raises(LoadError, match=r"no model folder .*nearest: .*flux"):
        model_source(str(whole.parent / "fluks"))
    with pytest.raises(LoadError, match="is a file"):
        model_source(str(whole / "model_index.json"))


def test_an_id_is_left_to_the_hub_and_told_when_it_is_not_there() -> None:
    assert model_source("nobody/no-such-model") == "nobody/no-such-model"
    with pytest.raises(LoadError, match="id 'nobody/no-such-model' cannot be loaded"):
        load_pipeline("nobody/no-such-model", dtype=torch.float32, device="cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_devices() -> None:
    assert pick_device("auto") == "cpu" == pick_device("cpu")
    for device, message in {
        "cuda": "torch sees 0 CUDA devices here; known: auto, cpu",
        "cuda:7": "torch sees 0 CUDA devices",
        "mps": "no such device",
        "gpu": "unknown device 'gpu'",
        "cudda": "unknown device 'cudda'; nearest: cuda",
    }.items():
        with pytest.raises(LoadError, match=message):
            pick_device(device)
    with pytest.raises(LoadError, match="--require-gpu"):
        pick_device("auto", require_gpu=True)


def test_dtypes() -> None:
    assert pick_dtype("auto", "cpu") is torch.float32
    assert pick_dtype("auto", "cuda:0") is torch.bfloat16
    assert pick_dtype("float16", "cpu") is torch.float16
    with pytest.raises(LoadError, match="unknown dtype 'bfloat'; nearest: bfloat16"):
        pick_dtype("bfloat", "cpu")
