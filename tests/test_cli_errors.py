"""Every mistake of a user's: one line on stderr that names it, exit code 2, no traceback, and nothing written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_text
import torch
from typer.testing import CliRunner, Result

from chitu_diffusion.cli.main import app

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_text.save("flux", tmp_path_factory.mktemp("models") / "flux")


def chitu(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def half(folder: Path) -> str:
    tiny_text.save("flux", folder / "half")
    path = folder / "half/transformer/diffusion_pytorch_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return str(folder / "half")


def write(name: str, content: bytes) -> Callable[[Path], str]:
    def make(folder: Path) -> str:
        (folder / name).write_bytes(content)
        return str(folder / name)

    return make


def existing(folder: Path) -> str:
    (folder / "there").mkdir()
    return str(folder / "there")


def inside_a_file(folder: Path) -> str:
    return write("file", b"x")(folder) + "/out"


BROKEN_MAP = b"raise ValueError('no map today')"
OTHER_MAP = b"from chitu_hooks import HookMap\nHOOK_MAP = HookMap(name='x', pipelines=('WanPipeline',))"
WRONG_MAP = (
    b"from chitu_hooks import HookMap, Stack\n"
    b"STACK = Stack('transformer_block', {'image': 'a'}, ('image',))\n"
    b"HOOK_MAP = HookMap(name='x', pipelines=('FluxPipeline',), stacks=(STACK,))"
)

Word = str | Callable[[Path], str]

MISTAKES: dict[str, tuple[list[Word], str]] = {
    "unknown model folder": (["--model", "no/such/folder"], "no model folder 'no/such/folder'"),
    "half-downloaded": (["--model", half], "is half downloaded"),
    "prompt file is missing": (["--prompts", "nothing.txt"], "--prompts 'nothing.txt': no such file"),
    "prompt file is not text": (["--prompts", write("p", b"\xff\xfe\x00\x01\x02")], "is not UTF-8 text"),
    "prompt file is binary": (["--prompts", write("p", b"a\0b")], "is not text"),
    "prompt file is empty": (["--prompts", write("p", b" \n\n")], "is empty"),
    "height": (
        ["--height", "15"],
        "--height 15 does not fit FluxPipeline, which takes a multiple of 2 pixels; nearest: 14 or 16",
    ),
    "output exists": (["--output", existing], "exists and is never overwritten; free: "),
    "output cannot be made": (["--output", inside_a_file], "is a file, so there can be no folder in it"),
    "unknown cache": (["--cache", "statik"], "no cache 'statik'; nearest: static"),
    "unknown cache parameter": (
        ["--cache", "static", "--cache-arg", "step=0"],
        "static has no parameter 'step'; nearest: steps",
    ),
    "cache parameter is missing": (["--cache", "static"], "static needs steps"),
    "cache parameter is wrong": (["--cache", "static", "--cache-arg", "steps=1,2"], "step 0 has nothing to reuse"),
    "cache parameter without a cache": (["--cache-arg", "steps=0"], "--cache-arg steps needs a cache"),
    "unknown kernel": (["--attention", "sdpa_maths"], "no attention kernel 'sdpa_maths'; nearest: sdpa_math"),
    "kernel that cannot run here": (["--attention", "sdpa_cudnn"], "sdpa_cudnn "),
    "cache-arg is no pair": (["--cache", "static", "--cache-arg", "steps"], "--cache-arg 'steps' is not KEY=VALUE"),
    "set is no pair": (["--set", "=3"], "--set '=3' is not KEY=VALUE"),
    "set twice": (["--set", "max_sequence_length=3"], "--set max_sequence_length is given twice"),
    "set has an unknown key": (["--set", "max_length=3"], "no such argument; nearest: max_sequence_length"),
    "set has no plain value": (["--set", "sigmas={a: 1}"], "is to be a number, a word"),
    "set cannot be read": (["--set", "sigmas=[1,"], "neither JSON nor YAML"),
    "negative steps": (["--steps", "-4"], "--steps -4 is not possible"),
    "steps is no number": (["--steps", "four"], "Invalid value for '--steps'"),
    "unknown option": (["--stepz", "4"], "--stepz"),
    "frames for pictures": (["--num-frames", "5"], "--num-frames has no meaning for FluxPipeline"),
    "fps for pictures": (["--fps", "5"], "--fps has no meaning for FluxPipeline"),
    "image is missing": (["--image", "nothing.png"], "--image 'nothing.png': no such file"),
    "image is no picture": (["--image", write("i.png", b"not a picture")], "is not a picture"),
    "mask is no picture": (["--mask", write("m.png", b"\x89PNG\r\n\x1a\n")], "is not a picture"),
    "negative prompt without guidance": (["--negative-prompt", "bad"], "--negative-prompt has no effect"),
    "require a GPU": (["--require-gpu"], "--require-gpu: torch sees no GPU"),
    "unknown dtype": (["--dtype", "float31"], "unknown dtype 'float31'; nearest: float32"),
    "unknown device": (["--device", "cup"], "unknown device 'cup'"),
    "device that is not here": (["--device", "cuda:3"], "torch sees 0 CUDA devices"),
    "hook map is missing": (["--hook-map", "nothing.py"], "no hook map file 'nothing.py'"),
    "hook map does not run": (["--hook-map", write("map.py", BROKEN_MAP)], "does not run: ValueError: no map today"),
    "hook map has no map": (["--hook-map", write("map.py", b"x = 1")], "has no HOOK_MAP"),
    "hook map is for another": (
        ["--hook-map", write("map.py", OTHER_MAP)],
        "is for WanPipeline, not for FluxPipeline; that of FluxPipeline is 'flux'",
    ),
    "hook map has a wrong path": (
        ["--hook-map", write("map.py", WRONG_MAP)],
        "has no stack 'transformer_block'; nearest: transformer_blocks",
    ),
    "the pipeline refuses": (
        ["--set", "max_sequence_length=100000"],
        "FluxPipeline refuses the request: `max_sequence_length`",
    ),
}
GPU = {"kernel that cannot run here", "require a GPU", "device that is not here"}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(mistake: str, flux: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if mistake in GPU and torch.cuda.is_available():
        pytest.skip("says what happens without a GPU")
    monkeypatch.chdir(tmp_path)
    words, message = MISTAKES[mistake]
    words = [word if isinstance(word, str) else word(tmp_path) for word in words]
    before = sorted(tmp_path.rglob("*"))
    base = ["--model", flux] if "--model" not in words else []
    base += ["--prompt", "a"] if "--prompts" not in words else []
    base += ["--output", "deep/out"] if "--output" not in words else []
    base += ["--set", "max_sequence_length=16"] if mistake != "the pipeline refuses" else []
    base += [] if "--steps" in words else ["--steps", "1"]
    sizes = ["--width", "16", *([] if "--height" in words else ["--height", "16"])]
    done = chitu("run", *base, *sizes, *words)
    lines = done.stderr.strip().splitlines()
    assert done.exit_code == 2, (done.output, done.exception)
    assert len(lines) == 1 and lines[0].startswith("chitu: ") and message in lines[0], lines
    assert "Traceback" not in done.output and done.stdout == ""
    assert sorted(tmp_path.rglob("*")) == before


def test_the_same_words_without_a_mistake_work(flux: Path, tmp_path: Path) -> None:
    words = [
        "--model",
        flux,
        "--prompt",
        "a",
        *tiny_text.SIZES["flux"],
        "--steps",
        "1",
        "--output",
        tmp_path / "deep/out",
    ]
    assert chitu("run", *words).exit_code == 0
    assert (tmp_path / "deep/out/picture-000.png").is_file()


def test_no_prompt(tmp_path: Path) -> None:
    done = chitu("run", "--output", tmp_path / "out")
    assert done.exit_code == 2 and "chitu: there is no prompt" in done.stderr


def test_no_embedded_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from chitu_diffusion import demo

    monkeypatch.setattr(demo, "model_folder", lambda: tmp_path / "nowhere")
    done = chitu("run", "--prompt", "a", "--output", tmp_path / "out")
    assert done.exit_code == 2 and "has no embedded model" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [["--height", "15"], ["--cache", "statik"], ["--set", "x"], ["--steps", "0"]])
def test_verify_tells_mistakes_the_same_way(flux: Path, words: list[str]) -> None:
    done = chitu("verify", "--model", flux, *words)
    lines = done.stderr.strip().splitlines()
    assert done.exit_code == 2 and len(lines) == 1 and lines[0].startswith("chitu: "), done.output


def test_a_broken_diffusers_is_no_traceback(flux: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "diffusers", None)
    done = chitu("run", "--prompt", "a", "--output", tmp_path / "out")
    assert done.exit_code == 2 and "import diffusers fails" in done.stderr and "chitu env" in done.stderr
