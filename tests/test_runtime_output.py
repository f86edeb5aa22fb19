"""The output folder: all of it or nothing, and never on top of another. Pictures and clips."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from chitu_diffusion.runtime import DiffusionTask, Item, Metrics, OutputError, Result, Shape, new_folder, write_result
from chitu_diffusion.runtime import output as module
from chitu_diffusion.runtime.call import CallPlan
from chitu_diffusion.runtime.output import default_folder, free_name


def pictures(count: int) -> list[Any]:
    return [Image.new("RGB", (32, 16), (40 * number, 10, 200)) for number in range(count)]


def result(items: list[Item]) -> Result:
    shape = Shape(height=16, width=32, frames=None, multiple=8, frame_multiple=1, latent=None, tokens=None, text=None)
    plan = CallPlan(arguments={}, shape=shape, placed={}, filled_in={}, fps=None)
    task = DiffusionTask(prompts=("a cat",))
    return Result(task=task, plan=plan, items=items, reports=[{"prompt": "a cat"}], metrics=Metrics(), pipeline="P")


def test_the_folder_appears_whole(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "er" / "out"
    with new_folder(target) as temporary:
        assert temporary.parent == target.parent and not target.exists()
        (temporary / "file").write_text("x")
    assert [path.name for path in target.parent.iterdir()] == ["out"]
    assert (target / "file").read_text() == "x"
    assert target.stat().st_mode & 0o755 == 0o755


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_nothing_is_left_after_a_failure(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), new_folder(tmp_path / "deep" / "out") as temporary:
        (temporary / "half").write_text("x")
        raise error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["folder", "file", "dangling link"])
def test_what_exists_is_never_overwritten(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "out"
    if kind == "folder":
        target.mkdir()
    elif kind == "file":
        target.write_text("mine")
    else:
        target.symlink_to(tmp_path / "nowhere")
    with pytest.raises(OutputError, match=r"exists and is never overwritten; free: .*out-2"), new_folder(target):
        pytest.fail("it was entered")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_appears_meanwhile_is_not_overwritten_either(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with pytest.raises(OutputError, match="exists"), new_folder(target) as temporary:
        (temporary / "ours").write_text("x")
        target.mkdir()
    assert [path.name for path in tmp_path.rglob("*")] == ["out"]


def test_a_place_that_cannot_be_written_is_known_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="is a file"), new_folder(tmp_path / "file" / "out"):
        pytest.fail("it was entered")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_names_that_are_free(tmp_path: Path) -> None:
    assert free_name(tmp_path / "a") == tmp_path / "a"
    (tmp_path / "a").mkdir()
    (tmp_path / "a-2").mkdir()
    assert free_name(tmp_path / "a") == tmp_path / "a-3"
    made = default_folder("A red apple, on a *blue* background " * 3, tmp_path)
    assert made.parent == tmp_path and made.name.endswith("-a-red-apple-on-a-blue-background-a-red-a")
    assert default_folder("苹果", tmp_path).name.count("-") == 1


def test_pictures_and_json(tmp_path: Path) -> None:
    items = [Item(prompt="a cat", frames=[picture]) for picture in pictures(3)]
    names = write_result(tmp_path, result(items), {"given": {"prompts": ["a cat"]}})
    assert names == ["picture-000.png", "picture-001.png", "picture-002.png"]
    for name, picture in zip(names, pictures(3)):
        assert Image.open(tmp_path / name).tobytes() == picture.tobytes()
    assert json.loads((tmp_path / "request.json").read_text())["given"] == {"prompts": ["a cat"]}
    report = json.loads((tmp_path / "report.json").read_text())
    assert [entry["file"] for entry in report["files"]] == names and report["generations"] == [{"prompt": "a cat"}]
    assert set(json.loads((tmp_path / "metrics.json").read_text())["seconds"]) == {
        "load",
        "encode",
        "denoise",
        "decode",
    }


def test_a_clip_without_ffmpeg_is_a_lossless_animation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_has_mp4", lambda: False)
    (name,) = write_result(tmp_path, result([Item(prompt="p", frames=pictures(5), fps=8.0)]), {})
    clip = Image.open(tmp_path / name)
    assert (name, clip.n_frames) == ("clip-000.webp", 5)
    for number, picture in enumerate(pictures(5)):
        clip.seek(number)
        assert clip.convert("RGB").tobytes() == picture.tobytes()
        assert clip.info["duration"] == 125


@pytest.mark.skipif(not module._has_mp4(), reason="needs imageio and imageio-ffmpeg")
def test_a_clip_with_ffmpeg_is_an_mp4(tmp_path: Path) -> None:
    import imageio

    (name,) = write_result(tmp_path, result([Item(prompt="p", frames=pictures(5), fps=8.0)]), {})
    with imageio.get_reader(tmp_path / name) as clip:
        assert name == "clip-000.mp4" and clip.get_meta_data()["fps"] == 8.0
        assert clip.get_data(0).shape == (16, 32, 3)
        assert sum(1 for _ in clip) == 5
