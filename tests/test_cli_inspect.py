"""``chitu inspect``: an id, a folder, a class or a Python file; the map in use, the gap report, and every mistake."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import small
import tiny_text
from typer.testing import CliRunner, Result

from chitu_diffusion import adapters
from chitu_diffusion.cli.main import app
from chitu_hooks import load_hook_map

ROOT = Path(__file__).resolve().parent.parent


def chitu(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "160"})


def data(*words: object) -> dict[str, Any]:
    done = chitu("inspect", *words, "--json")
    assert done.exit_code == 0, (done.output, done.exception)
    return json.loads(done.stdout)


@pytest.fixture
def no_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if nobody had written a hook map yet."""
    monkeypatch.setattr(adapters, "adapters_folder", lambda: tmp_path / "nothing")
    adapters.registry.cache_clear()
    yield
    adapters.registry.cache_clear()


def test_the_embedded_model() -> None:
    found = data()
    assert found["pipeline"] == "FluxPipeline" and found["kind"] == "folder"
    assert found["hook_map"] == {"name": "flux", "source": "registry", "seen": False}
    assert found["draft"] is None and found["gap"]["not_covered"] == 0
    done = chitu("inspect")
    assert done.exit_code == 0 and "hook map 'flux' (registry)" in done.output
    assert "FluxAttnProcessor" in done.output and "not covered: 0 of" in done.output


def test_a_folder_needs_no_weights(tmp_path: Path) -> None:
    folder = tiny_text.save("sd3", tmp_path / "sd3")
    for file in folder.rglob("*.safetensors"):
        file.unlink()
    found = data(folder)
    assert (found["pipeline"], found["hook_map"]["name"]) == ("StableDiffusion3Pipeline", "sd3")
    stack = next(row for row in found["sites"] if row["kind"] == "stack")
    assert (stack["site"], stack["count"]) == ("transformer.transformer_blocks", 3), (
        "the folder's layers, not the class's"
    )
    encoders = {piece["name"] for piece in found["gap"]["pieces"] if piece["part"] == "prompt encoding"}
    assert "CLIPTextModelWithProjection" in encoders and "T5EncoderModel" in encoders


def test_a_class(no_adapters: None) -> None:
    found = data("StableDiffusion3Pipeline")
    assert found["kind"] == "class" and found["hook_map"]["source"] == "inferred" and not found["hook_map"]["seen"]
    stack = next(row for row in found["sites"] if row["kind"] == "stack")
    assert stack["count"] == 18 and "image hidden_states" in stack["note"]


def test_a_file_is_called_if_it_says_how(no_adapters: None, tmp_path: Path) -> None:
    without = data(small.write(tmp_path, small.OVIS, "without.py"))
    called = data(small.write(tmp_path, small.OVIS + small.CALL, "called.py"))
    assert (without["hook_map"]["seen"], called["hook_map"]["seen"]) == (False, True)
    assert "not seen in a call" in without["draft"] and "seen in a call" in called["draft"]
    path = small.write(tmp_path, called["draft"], "map.py")
    assert load_hook_map(path).pipelines == ("OvisImagePipeline",)
    explicit = data(tmp_path / "called.py", "--hook-map", path)
    assert explicit["hook_map"]["source"] == "explicit" and explicit["draft"] is None


@pytest.mark.slow
def test_an_id_needs_configurations_only(tmp_path: Path) -> None:
    """The Hub's cache as a download leaves it, of everything but the weights."""
    made = tiny_text.save("flux", tmp_path / "made")
    (made / "README.md").write_text("---\nlicense: mit\n---\n")
    for file in made.rglob("*.safetensors"):
        file.unlink()
    home = tmp_path / "hub/models--maker--small"
    (home / "refs").mkdir(parents=True)
    (home / "refs/main").write_text("0" * 40)
    shutil.copytree(made, home / "snapshots" / ("0" * 40))
    code = "from chitu_diffusion.cli.main import main; import sys; sys.argv[1:] = ['inspect', 'maker/small', '--json']; main()"
    env = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["kind"], found["pipeline"], found["hook_map"]["name"]) == ("id", "FluxPipeline", "flux")
    assert next(row for row in found["sites"] if row["kind"] == "stack")["count"] == 2


def test_a_module_level_pipe(tmp_path: Path) -> None:
    path = small.write(tmp_path, small.OVIS + "\n\npipe = build()\ndel build\nprint('hello')\n")
    assert data(path)["pipeline"] == "OvisImagePipeline", "what the file prints is not in the JSON"


def test_the_report_is_written(tmp_path: Path) -> None:
    file = tmp_path / "refs/sana/gap.md"
    done = chitu("inspect", "SanaPipeline", "--write", file)
    assert done.exit_code == 0, done.output
    text = file.read_text()
    found = data("SanaPipeline")["gap"]
    assert f"**Not covered: {found['not_covered']} of {sum(found['lines'].values())} lines.**" in text
    assert all(f"| {kind} |" in text for kind in found["lines"])
    assert "`SanaLinearAttnProcessor2_0`" in text.partition("## Covered")[0]
    again = chitu("inspect", "SanaPipeline", "--write", file)
    assert again.exit_code == 2 and "exists already" in again.stderr and file.read_text() == text


def write(name: str, text: str) -> Callable[[Path], str]:
    return lambda folder: str(small.write(folder, text, name))


def half(folder: Path) -> str:
    tiny_text.save("flux", folder / "half")
    (folder / "half/transformer/config.json").write_text("{")
    return str(folder / "half")


def without_config(folder: Path) -> str:
    tiny_text.save("flux", folder / "half")
    (folder / "half/transformer/config.json").unlink()
    return str(folder / "half")


def misfit(folder: Path) -> str:
    tiny_text.save("flux", folder / "half")
    path = folder / "half/transformer/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_attention_heads": "two"}))
    return str(folder / "half")


MISTAKES: dict[str, tuple[str | Callable[[Path], str], tuple[str, ...]]] = {
    "unknown class": ("FluxPipelin", ("no pipeline class 'FluxPipelin'", "nearest: FluxPipeline")),
    "a model class": ("FluxTransformer2DModel", ("no pipeline class 'FluxTransformer2DModel'",)),
    "a modular pipeline": ("WanModularPipeline", ("WanModularPipeline is a modular pipeline",)),
    "no defaults": ("LattePipeline", ("cannot be built from defaults", "LatteTransformer3DModel", "build()")),
    "unknown folder": ("no/such/folder", ("no model folder or file 'no/such/folder'",)),
    "an id without a network": ("nobody/nothing", ("the configurations of 'nobody/nothing' cannot be fetched",)),
    "no pipeline folder": (lambda folder: str(folder), ("has no model_index.json",)),
    "a config that is cut off": (half, ("config.json' cannot be read",)),
    "a missing config": (without_config, ("has no transformer/config.json", "FluxTransformer2DModel")),
    "a config that does not fit": (misfit, ("cannot be built from transformer/config.json",)),
    "another kind of file": (write("a.txt", "x"), ("is a file",)),
    "unknown file": ("nothing.py", ("no file 'nothing.py'",)),
    "a file that raises": (write("a.py", "1 / 0"), ("does not run: ZeroDivisionError: division by zero",)),
    "a file that does not parse": (write("a.py", "def"), ("does not run: SyntaxError",)),
    "a file that exits": (write("a.py", "raise SystemExit(3)"), ("does not run: SystemExit",)),
    "a builder that raises": (write("a.py", "def build():\n    raise OSError('no\\ndisk')"), ("OSError: no",)),
    "a file without a pipeline": (write("a.py", "x = 1"), ("has neither build() nor pipe",)),
    "something else": (write("a.py", "pipe = 3"), ("gives a int",)),
    "a call that raises": (
        write("a.py", small.OVIS + "\n\ndef call(pipe):\n    raise KeyError('prompt')\n"),
        ("call(pipe) of", "raises KeyError: 'prompt'"),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_adapters: None
) -> None:
    monkeypatch.chdir(tmp_path)
    given, words = MISTAKES[mistake]
    model = given if isinstance(given, str) else given(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    done = chitu("inspect", model, "--write", "refs/x/gap.md")
    lines = [line for line in done.stderr.strip().splitlines() if line.startswith("chitu: ")]
    assert done.exit_code == 2, (done.output, done.exception)
    assert len(lines) == 1 and all(word in lines[0] for word in words), done.stderr
    assert "Traceback" not in done.output and done.stdout == ""
    assert [path for path in sorted(tmp_path.rglob("*")) if "__pycache__" not in path.parts] == before
