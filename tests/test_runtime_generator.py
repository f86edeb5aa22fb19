"""`Generator` from Python: tasks in, pictures and books out, the pipeline as it was."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny_text
import torch

from chitu_diffusion import patch
from chitu_diffusion.runtime import DiffusionTask, Generator, RequestError
from chitu_diffusion.runtime.generator import items_of, quiet

SIZE = dict(height=16, width=16, steps=3, arguments={"max_sequence_length": 16})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_text.save("flux", tmp_path_factory.mktemp("models") / "flux")


def test_a_task_becomes_pictures_and_books(folder: Path) -> None:
    task = DiffusionTask(prompts=("a cat", "a dog"), model=str(folder), guidance=2.0, num_images=2, **SIZE)
    with Generator.load(task) as generator:
        result = generator.generate(task)
        again = generator.generate(task)
    assert [item.prompt for item in result.items] == ["a cat", "a cat", "a dog", "a dog"]
    pictures = [np.asarray(item.frames[0]) for item in result.items]
    assert all(np.array_equal(a, np.asarray(b.frames[0])) for a, b in zip(pictures, again.items))
    assert not np.array_equal(pictures[0], pictures[1]) and not np.array_equal(pictures[0], pictures[2])
    assert [report["prompt"] for report in result.reports] == ["a cat", "a dog"]
    assert result.reports[0]["branches"]["transformer/uncond"]["computed"] == 3
    assert result.metrics.steps == 6 and result.metrics.seconds["load"] > 0
    assert not generator.handle.active and type(generator.pipe).__name__ == "FluxPipeline"


def test_stages_of_a_task_are_its_first_call(folder: Path) -> None:
    task = DiffusionTask(
        prompts=("a cat", "a dog"), model=str(folder), cache="static", cache_args={"steps": "0,2"}, **SIZE
    )
    with Generator.load(task) as generator:
        expected = generator.generate(task)
        with generator.stages(task) as stages:
            assert len(list(stages.steps())) == 3
            image = stages.output().images[0]
    assert expected.reports[0]["branches"]["transformer/cond"]["skipped"] == 1
    assert np.array_equal(np.asarray(image), np.asarray(expected.items[0].frames[0]))


def test_a_handle_of_ones_own_will_do(folder: Path) -> None:
    pipe = tiny_text.text("flux")
    before = dict(vars(pipe)["_progress_bar_config"])
    with patch(pipe) as handle:
        result = Generator(handle).generate(DiffusionTask(prompts=("a",), **SIZE))
        assert handle.active and len(result.items) == 1
    assert vars(pipe)["_progress_bar_config"] == before


def test_the_progress_bar_setting_comes_back() -> None:
    pipe = tiny_text.text("flux")
    del pipe._progress_bar_config
    with quiet(pipe):
        assert pipe._progress_bar_config == {"disable": True}
    assert not hasattr(pipe, "_progress_bar_config")


def test_what_the_pipeline_refuses_is_a_request_error_and_a_bug_is_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tiny_text.text("flux")
    with patch(pipe) as handle:
        generator = Generator(handle)
        bad = DiffusionTask(prompts=("a",), height=16, width=16, steps=1, arguments={"max_sequence_length": 600})
        with pytest.raises(RequestError, match="FluxPipeline refuses the request: `max_sequence_length`"):
            generator.generate(bad)

        def buggy(*_: object, **__: object) -> None:
            raise ValueError("a bug")

        monkeypatch.setattr(pipe.vae, "decode", buggy)
        with pytest.raises(ValueError, match="a bug"):
            generator.generate(DiffusionTask(prompts=("a",), **SIZE))


def test_items() -> None:
    assert [len(item.frames) for item in items_of((["p", "q"],), "x", None)] == [1, 1]
    assert [len(item.frames) for item in items_of(([["p", "q"], ["r", "s"]],), "x", 8.0)] == [2, 2]
    assert [item.fps for item in items_of(([["layer", "layer"]],), "x", None)] == [None, None]


def test_nothing_depends_on_the_callers_gradient_mode(folder: Path) -> None:
    pipe = tiny_text.text("flux")
    found = []
    with patch(pipe) as handle:
        for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
            with mode():
                result = Generator(handle).generate(DiffusionTask(prompts=("a",), **SIZE))
            found.append(np.asarray(result.items[0].frames[0]).tobytes())
    assert len(set(found)) == 1
