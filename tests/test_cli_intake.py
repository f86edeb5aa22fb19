"""``chitu intake``: clone, weights and demo are recorded as they are; every mistake leaves nothing behind."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import tiny_text
import torch
from typer.testing import CliRunner, Result

from chitu_diffusion.cli.main import app

DEMO = """
import pathlib, sys
pathlib.Path("out").mkdir(exist_ok=True)
pathlib.Path("out/picture.txt").write_text("drawn by " + sys.argv[1])
assert not any("chitu" in name for name in sys.modules)
"""


def chitu(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=n", "-c", "user.email=n@example.org"]
    done = subprocess.run(["git", "-C", str(folder), *who, *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def upstream(tmp_path: Path) -> Path:
    """A repository of two commits with a licence and a demo."""
    folder = tmp_path / "upstream.git"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "LICENSE").write_text("\n  Apache License\n  Version 2.0\n")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "first")
    (folder / "demo.py").write_text(DEMO)
    (folder / "README.md").write_text(
        "Weights: <https://huggingface.co/papers/1234> https://huggingface.co/maker/small-1.0.\n"
    )
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "second")
    return folder


@pytest.fixture
def cloned(upstream: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``refs/mine`` with the clone, in the working folder."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    done = chitu("intake", "mine", "--upstream", upstream.as_uri())
    assert done.exit_code == 0, done.output
    return work / "refs/mine"


def test_the_clone_is_shallow_and_recorded(cloned: Path, upstream: Path) -> None:
    from chitu_diffusion.intake.upstream import clone_facts

    assert git(cloned / "upstream", "rev-list", "--count", "HEAD") == "1"
    facts = {what: value for what, value, _ in clone_facts(cloned / "upstream")}
    assert facts["commit that was read"].startswith(f"`{git(upstream, 'rev-parse', 'HEAD')[:8]}` of 20")
    assert facts["licence of the code"] == "Apache License"
    assert sorted(path.name for path in cloned.iterdir()) == ["upstream"]


def test_a_second_clone(cloned: Path, upstream: Path) -> None:
    (cloned / "upstream/mine.txt").write_text("kept")
    done = chitu("intake", "mine", "--upstream", upstream.as_uri())
    assert done.exit_code == 0 and git(upstream, "rev-parse", "HEAD")[:12] in done.output, "the same one: kept as it is"
    other = chitu("intake", "mine", "--upstream", upstream)
    assert other.exit_code == 2 and "exists already" in other.stderr
    assert (cloned / "upstream/mine.txt").read_text() == "kept"


def test_weights_are_looked_at_before_anything_is_cloned(
    upstream: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = chitu("intake", "mine", "--upstream", upstream.as_uri(), "--models-dir", "nowhere")
    assert done.exit_code == 2 and "no folder 'nowhere'" in done.stderr
    assert not (tmp_path / "refs").exists()


@pytest.mark.parametrize("url", ["nowhere", "file:///nowhere/at/all.git", "--upload-pack=touch x", ""])
def test_what_cannot_be_cloned_leaves_nothing(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = chitu("intake", "mine", f"--upstream={url}")
    assert done.exit_code == 2 and "cannot be cloned" in done.stderr and len(done.stderr.splitlines()) == 1, done.output
    assert list(tmp_path.iterdir()) == []


def test_the_checkout_of_this_project_ignores_a_clone() -> None:
    root = Path(__file__).resolve().parent.parent
    if (root / ".git").exists():
        git(root, "check-ignore", "-q", "refs/mine/upstream/demo.py")


# -- the demo ----------------------------------------------------------------------------------------------------------


def test_the_demo_is_recorded(cloned: Path) -> None:
    command = f"{sys.executable} demo.py 'somebody else'"
    done = chitu("intake", "mine", "--demo", command)
    assert done.exit_code == 0, (done.output, done.exception)
    data = json.loads((cloned / "demo.json").read_text())
    assert (data["command"], data["folder"], data["device"]) == (command, "upstream", "cpu")
    assert data["commit"] == git(cloned / "upstream", "rev-parse", "HEAD")
    drawn = b"drawn by somebody else"
    assert data["outputs"] == [
        {"file": "out/picture.txt", "bytes": len(drawn), "sha256": hashlib.sha256(drawn).hexdigest()}
    ]
    assert 0 < data["seconds"] < 60 and data["gpu_memory_peak_bytes"] == 0
    again = chitu("intake", "mine", "--demo", command)
    assert again.exit_code == 2 and "demo.json' exists already" in again.stderr


FAILING = {
    "that raises": (
        f"{sys.executable} -c \"raise ValueError('no picture')\"",
        "the demo ended with 1: ValueError: no picture",
    ),
    "that is not there": ("no-such-command --now", "'no-such-command' cannot be started"),
    "that is no command": ("python 'demo.py", "is no command: No closing quotation"),
    "that is empty": ("", "--demo is empty"),
}


@pytest.mark.parametrize("case", FAILING)
def test_a_demo(case: str, cloned: Path) -> None:
    command, message = FAILING[case]
    done = chitu("intake", "mine", f"--demo={command}")
    assert done.exit_code == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1, done.output
    assert not (cloned / "demo.json").exists()


def test_a_demo_without_a_clone_runs_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo.py").write_text(DEMO)
    done = chitu("intake", "mine", "--demo", f"{sys.executable} demo.py me")
    assert done.exit_code == 0, done.output
    data = json.loads((tmp_path / "refs/mine/demo.json").read_text())
    assert data["folder"] == tmp_path.name and data["commit"] is None
    assert [output["file"] for output in data["outputs"]] == ["out/picture.txt"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_a_gpu_is_required(cloned: Path) -> None:
    done = chitu("intake", "mine", "--demo", f"{sys.executable} demo.py me", "--require-gpu")
    assert done.exit_code == 2 and "--require-gpu: torch sees no GPU" in done.stderr
    assert not (cloned / "demo.json").exists() and not (cloned / "upstream/out").exists(), "the demo was not started"


def test_a_demo_that_does_not_use_the_gpu_is_refused(cloned: Path) -> None:
    from chitu_diffusion.intake.errors import IntakeError
    from chitu_diffusion.intake.upstream import run_demo

    with pytest.raises(IntakeError, match="used no memory of the GPU"):
        run_demo(f"{sys.executable} demo.py me", cloned, cloned / "upstream", "a GPU", require_gpu=True)
    assert not (cloned / "demo.json").exists()


# -- weights -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A pipeline's folder whose transformer is in several shards."""
    folder = tiny_text.save("flux", tmp_path / "model")
    shutil.rmtree(folder / "transformer")
    tiny.build("flux").transformer.save_pretrained(folder / "transformer", max_shard_size="40KB")
    assert len(shards(folder)) > 2
    return folder


def shards(folder: Path) -> list[Path]:
    return sorted((folder / "transformer").glob("*.safetensors"))


def test_whole_weights(sharded: Path) -> None:
    done = chitu("intake", "mine", "--models-dir", sharded)
    assert done.exit_code == 0, done.output
    index = json.loads(next((sharded / "transformer").glob("*.index.json")).read_text())
    line = next(line for line in done.stdout.splitlines() if line.startswith(f"{sharded / 'transformer'}: "))
    assert (
        f"{len(shards(sharded))} files" in line
        and f"{len(index['weight_map'])} tensors, all shards of its index" in line
    )
    assert len(done.stdout.splitlines()) == 4, "transformer, VAE and two text encoders"


def cut(folder: Path) -> str:
    shards(folder)[1].write_bytes(shards(folder)[1].read_bytes()[:-7])
    return "is cut off: "


def longer(folder: Path) -> str:
    with shards(folder)[1].open("ab") as stream:
        stream.write(b"\0")
    return "is too long: "


def missing(folder: Path) -> str:
    number, name = len(shards(folder)), shards(folder)[1].name
    shards(folder)[1].unlink()
    return f"1 of {number} weight files of transformer are missing ({name} is the first)"


def empty(folder: Path) -> str:
    shards(folder)[1].write_bytes(b"")
    return "is empty"


def pointer(folder: Path) -> str:
    shards(folder)[1].write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    return "is a Git LFS pointer"


def no_header(folder: Path) -> str:
    shards(folder)[1].write_bytes(struct.pack("<Q", 10**12) + b"x" * 100)
    return "has no readable safetensors header"


def header_cut(folder: Path) -> str:
    shards(folder)[1].write_bytes(shards(folder)[1].read_bytes()[:20])
    return "has no readable safetensors header"


def of_another(folder: Path) -> str:
    first, second = shards(folder)[:2]
    second.write_bytes(first.read_bytes())
    return "of different versions"


def partial(folder: Path) -> str:
    shards(folder)[1].rename(shards(folder)[1].with_suffix(".safetensors.incomplete"))
    return "is a part of a file"


def no_index(folder: Path) -> str:
    next((folder / "transformer").glob("*.index.json")).write_text("[]")
    return "is not a list of weight files"


BREAKS: list[Callable[[Path], str]] = [
    cut, longer, missing, empty, pointer, no_header, header_cut, of_another, partial, no_index,
]  # fmt: skip


@pytest.mark.parametrize("harm", BREAKS, ids=lambda harm: harm.__name__)
def test_broken_weights(harm: Callable[[Path], str], sharded: Path) -> None:
    message = harm(sharded)
    done = chitu("intake", "mine", "--models-dir", sharded)
    assert done.exit_code == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1, done.output
    assert "transformer/" in done.stderr or "transformer are" in done.stderr
    assert done.stdout == ""


def test_missing_weights_say_how_to_fetch_them(cloned: Path, tmp_path: Path) -> None:
    models = tmp_path / "models"
    done = chitu("intake", "mine", "--models-dir", models)
    assert done.exit_code == 2 and f"hf download maker/small-1.0 --local-dir {models}" in done.stderr
    models.mkdir()
    done = chitu("intake", "mine", "--models-dir", models)
    assert (
        done.exit_code == 2 and "there are no weights" in done.stderr and "hf download maker/small-1.0" in done.stderr
    )
    done = chitu("intake", "other", "--models-dir", models)
    assert "hf download ORGANISATION/MODEL" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mine"], "there is nothing to record"),
        (["../mine", "--models-dir", "x"], "'../mine' cannot name a family"),
        (["Mine", "--models-dir", "x"], "'Mine' cannot name a family"),
        ([], "Missing argument 'NAME'"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = chitu("intake", *words)
    assert done.exit_code == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1, done.output
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, upstream: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "refs").write_text("a file")
    done = chitu("intake", "mine", "--upstream", upstream.as_uri())
    assert done.exit_code == 2 and "cannot be made" in done.stderr, done.output
    assert (tmp_path / "refs").read_text() == "a file"
