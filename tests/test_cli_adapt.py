"""``chitu adapt``: what it writes works without an edit, or nothing is written; ``--finish`` finds what is left over."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import small
import test_house
import tiny_text
from typer.testing import CliRunner, Result

from chitu_diffusion import adapters
from chitu_diffusion.cli.main import app
from chitu_diffusion.intake.check import check_adapter
from chitu_hooks import load_hook_map


def chitu(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "160"})


@pytest.fixture(autouse=True)
def no_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if nobody had written a hook map yet."""
    monkeypatch.setattr(adapters, "adapters_folder", lambda: tmp_path / "nothing")
    adapters.registry.cache_clear()
    yield
    adapters.registry.cache_clear()


def files(folder: Path) -> set[str]:
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return {name for name in found if "__pycache__" not in name}


def written_test(root: Path) -> Path:
    return root / "tests/test_adapter_ovis_image.py"


@pytest.fixture
def ovis(tmp_path: Path) -> Path:
    return small.write(tmp_path, small.OVIS + small.CALL, "ovis.py")


def test_a_file_that_can_be_called(ovis: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    done = chitu("adapt", ovis, "--root", root)
    assert done.exit_code == 0, (done.output, done.exception)
    assert files(root) == {
        "adapters/ovis_image.py", "refs/ovis_image/README.md", "refs/ovis_image/gap.md",
        "tests/test_adapter_ovis_image.py", "tests/adapted/ovis_image.py",
    }  # fmt: skip
    assert "skipped 4 in 3 steps" in done.output and "to fill in" not in done.output
    path = root / "adapters/ovis_image.py"
    test_house.test_adapter_is_short_and_only_data(path)
    stacks = load_hook_map(path).stacks or ()
    assert [(stack.returns, stack.order) for stack in stacks] == [(("text", "image"), ("text", "image"))] * 2
    page = (root / "refs/ovis_image/README.md").read_text()
    assert "| `guidance_scale` | 5.0 | `pipeline_ovis_image.py:" in page
    assert "24 heads" in page, "of the class, not of the tiny one"
    assert "AIDC-AI/Ovis-Image-7B" in page and "Not read yet: official repository" in page
    for words in (["check", "--line-length", "120"], ["format", "--check", "--line-length", "120"]):
        ruff = [sys.executable, "-m", "ruff", *words, "--isolated", root / "adapters", written_test(root)]
        assert subprocess.run(ruff, capture_output=True).returncode == 0, words


def test_the_test_that_is_written_passes_and_can_fail(ovis: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    assert chitu("adapt", ovis, "--root", root).exit_code == 0
    test = written_test(root)
    names: dict[str, object] = {"__file__": str(test)}
    exec(compile(test.read_text(), str(test), "exec"), names)
    names["test_ovis_image"]()  # type: ignore[operator]
    path = root / "adapters/ovis_image.py"
    path.write_text(path.read_text().replace('returns=("text", "image")', 'returns=("image", "text")', 1))
    with pytest.raises(Exception, match=r"size|shape|tensor"):
        names["test_ovis_image"]()  # type: ignore[operator]


def test_the_example_of_the_page(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parent.parent / "docs/adapting-a-model.md").read_text()
    example = page.partition("```python\n")[2].partition("```")[0]
    done = chitu("adapt", small.write(tmp_path, example, "prx.py"), "--root", tmp_path / "root")
    assert done.exit_code == 0, (done.output, done.exception)
    assert "to fill in" not in done.output and "skipped 3 in 4 steps" in done.output
    assert (tmp_path / "root/adapters/prx.py").is_file()


def test_a_check_that_fails_is_named(ovis: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from chitu_hooks import Call

    root = tmp_path / "root"
    assert chitu("adapt", ovis, "--root", root).exit_code == 0
    monkeypatch.setattr(Call, "can_skip", property(lambda self: False))
    failed = check_adapter(root / "adapters/ovis_image.py", str(ovis))
    assert failed == ["skips: a static cache computed 6 calls and skipped 0 in 3 steps"]
    done = chitu("adapt", ovis, "--root", tmp_path / "other")
    assert done.exit_code == 1 and "FAILED skips" in done.output and "nothing was written" in done.output
    assert not (tmp_path / "other").exists()


def test_a_hook_that_is_not_exact_is_never_written(ovis: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from chitu_diffusion.evaluation.parity import Probe

    monkeypatch.setattr(Probe, "attention", lambda self, q, k, v, ctx: ctx.next(q, k, v) * 1.01)
    done = chitu("adapt", ovis, "--root", tmp_path / "root")
    assert done.exit_code == 1 and "FAILED exact" in done.output and not (tmp_path / "root").exists()


def test_a_folder_is_loaded_and_called(tmp_path: Path) -> None:
    model = tiny_text.save("sd3", tmp_path / "sd3")
    (model / "README.md").write_text("---\nlicense: other\nlicense_link: LICENSE.md\n---\n# A model\n")
    root = tmp_path / "root"
    words = ["--height", 16, "--width", 16, "--set", "max_sequence_length=16", "--name", "mine"]
    done = chitu("adapt", model, "--root", root, *words)
    assert done.exit_code == 0, (done.output, done.exception)
    hook_map = load_hook_map(root / "adapters/mine.py")
    assert hook_map.name == "mine" and hook_map.guidance == "batched"
    assert (hook_map.stacks or ())[0].order == ("image", "text"), "the order that a call showed"
    page = (root / "refs/mine/README.md").read_text()
    assert "| license | other | front matter of the model card |" in page
    assert "| `transformer.transformer_blocks` | 3 × `JointTransformerBlock` | `transformer/config.json` |" in page
    assert "tests/adapted/mine/transformer/config.json" in files(root)
    assert not [name for name in files(root) if name.endswith(".safetensors")]
    assert check_adapter(root / "adapters/mine.py", str(root / "tests/adapted/mine")) == []


def test_a_class_says_what_is_open(tmp_path: Path) -> None:
    root = tmp_path / "root"
    done = chitu("adapt", "Flux2KleinPipeline", "--root", root)
    assert done.exit_code == 0, (done.output, done.exception)
    assert "not called" in done.output and "to fill in: single_transformer_blocks: " in done.output
    text = (root / "adapters/flux2.py").read_text()
    assert "# Fill in: single_transformer_blocks" in text
    assert check_adapter(root / "adapters/flux2.py", "Flux2KleinPipeline") == []
    assert "no call was made with it" in (root / "refs/flux2/README.md").read_text()


def test_what_is_there_already(ovis: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    there = root / "refs/ovis_image/gap.md"
    there.parent.mkdir(parents=True)
    there.write_text("mine")
    done = chitu("adapt", ovis, "--root", root)
    assert done.exit_code == 2 and "gap.md' exists already" in done.stderr
    assert files(root) == {"refs/ovis_image/gap.md"} and there.read_text() == "mine"


def test_a_pipeline_that_has_a_map(ovis: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    assert chitu("adapt", ovis, "--root", root).exit_code == 0
    before = files(root)
    done = chitu("adapt", ovis, "--root", root, "--name", "again")
    assert done.exit_code == 2 and "OvisImagePipeline has a hook map already, 'ovis_image'" in done.stderr
    assert files(root) == before


def test_a_disk_that_is_full(ovis: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.open

    def full(self: Path, mode: str = "r", *rest: object, **more: object):
        if mode == "x" and self.name == "gap.md":
            raise OSError(28, "No space left on device", str(self))
        return real(self, mode, *rest, **more)

    monkeypatch.setattr(Path, "open", full)
    done = chitu("adapt", ovis, "--root", tmp_path / "root")
    assert done.exit_code == 2 and "No space left on device; nothing was" in done.stderr
    assert not (tmp_path / "root").exists(), "no folder either"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "which model?"),
        (["OvisImagePipeline", "--name", "Ovis Image"], "'Ovis Image' cannot name a family"),
        (["OvisImagePipeline", "--finish"], "--finish looks at the whole working tree"),
        (["OvisImagePipeline", "--set", "x"], "--set 'x' is not KEY=VALUE"),
        (["nothing.py"], "no file 'nothing.py'"),
        (["--finish"], "is in no git repository"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = chitu("adapt", *words)
    assert done.exit_code == 2 and message in done.stderr and "Traceback" not in done.output, done.output
    assert list(tmp_path.iterdir()) == []


# -- the last of it ----------------------------------------------------------------------------------------------------


def git(folder: Path, *words: str) -> None:
    who = ["-c", "user.name=n", "-c", "user.email=n@example.org"]
    subprocess.run(["git", "-C", str(folder), *who, *words], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "repository"
    for folder in ("adapters", "ChituBench/plots", "ChituBench/results", "tests"):
        (root / folder).mkdir(parents=True)
    (root / "ChituBench/results/speed.json").write_text("{}\n")
    (root / "ChituBench/plots/speed_of_all.png").write_text("a picture\n")
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "first")
    return root


def test_a_clean_tree(repository: Path) -> None:
    (repository / "adapters/mine.py").write_text("x = 1\n")
    (repository / "tests/test_adapter_mine.py").write_text("x = 1\n")
    before = files(repository)
    done = chitu("adapt", "--finish", "--root", repository)
    assert done.exit_code == 0, done.output
    assert done.output.count("ok    ") == 7 and "FAILED" not in done.output
    assert "git add -- adapters/mine.py && git commit -m 'Hook maps: mine'" in done.output
    assert "git add -- tests/test_adapter_mine.py && git commit -m 'Tests: mine'" in done.output
    assert "python -m pytest -q tests/test_adapter_mine.py" in done.output
    assert "chitu verify MODEL --hook-map adapters/mine.py" in done.output
    assert files(repository) == before, "nothing is written, no bytecode either"


def older_plot(root: Path) -> None:
    (root / "ChituBench/results/speed.json").write_text("[]\n")


def both_changed(root: Path) -> None:
    (root / "ChituBench/plots/speed_of_all.png").write_text("another picture\n")
    older_plot(root)
    os.utime(root / "ChituBench/results/speed.json", (time.time() + 60, time.time() + 60))


def tracked_bytecode(root: Path) -> None:
    (root / "a.pyc").write_bytes(b"\0")


LEFT_OVER = {
    "git diff --check": (lambda root: (root / "adapters/a.py").write_text("x = 1  \n"), "adapters/a.py:1: trailing"),
    "compileall": (lambda root: (root / "adapters/a.py").write_text("def\n"), "adapters/a.py:1: invalid syntax"),
    "debugger calls": (
        lambda root: (root / "a.py").write_text("import pdb\npdb.set_trace()\n"),
        "a.py:2: pdb.set_trace",
    ),
    "debug folders": (lambda root: small.write(_folder(root / "debug-1/x"), "a\n", "a.txt"), "debug-1"),
    "symlinks": (lambda root: (root / "link").symlink_to("adapters"), "link"),
    "stale plots": (older_plot, "plots/speed_of_all.png is older than ChituBench/results/speed.json"),
    "bytecode": (tracked_bytecode, "a.pyc"),
}


def _folder(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


@pytest.mark.parametrize("name", LEFT_OVER)
def test_what_is_left_over_is_found(name: str, repository: Path) -> None:
    leave, line = LEFT_OVER[name]
    leave(repository)
    done = chitu("adapt", "--finish", "--root", repository)
    assert done.exit_code == 1, done.output
    failed = [text.removeprefix("FAILED ") for text in done.output.splitlines() if text.startswith("FAILED")]
    assert failed == [name]
    assert line in done.output


def test_plots_and_results_that_both_changed(repository: Path) -> None:
    both_changed(repository)
    assert "FAILED stale plots" in chitu("adapt", "--finish", "--root", repository).output
    os.utime(repository / "ChituBench/plots/speed_of_all.png", (time.time() + 120, time.time() + 120))
    assert "ok     stale plots" in chitu("adapt", "--finish", "--root", repository).output
