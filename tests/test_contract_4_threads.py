"""Contract 4: two threads in one pipeline get a clear error, never a wrong picture."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from probes import Keep, Watch
from tiny import build, run

from chitu_hooks import GenerationError, patch


def in_threads(*works: Any) -> list[Any]:
    results: list[Any] = [None] * len(works)

    def body(index: int) -> None:
        try:
            results[index] = works[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=body, args=(index,)) for index in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def test_two_threads_in_one_pipeline() -> None:
    pipe = build("flux")
    with patch(pipe, [Keep(0, 2)]):
        fresh = run("flux", pipe, 4)
        inside, release = threading.Event(), threading.Event()

        def wait(pipe: Any, step: int, timestep: Any, kwargs: Any) -> dict[str, Any]:
            inside.set()
            release.wait(30)
            return {}

        def second() -> Any:
            inside.wait(30)
            try:
                return run("flux", pipe, 4)
            finally:
                release.set()

        first, refused = in_threads(lambda: run("flux", pipe, 4, callback_on_step_end=wait), second)
        assert torch.equal(first, fresh)
        assert isinstance(refused, GenerationError)
        assert "another thread" in str(refused)
        assert torch.equal(run("flux", pipe, 4), fresh), "and afterwards it works again"


def test_reentering_from_a_callback() -> None:
    pipe = build("flux")
    seen = []

    def again(pipe: Any, step: int, timestep: Any, kwargs: Any) -> dict[str, Any]:
        with pytest.raises(GenerationError, match="this thread"):
            run("flux", pipe, 2)
        seen.append(step)
        return {}

    with patch(pipe, [Watch()]):
        run("flux", pipe, 2, callback_on_step_end=again)
    assert seen == [0, 1]


def test_siblings_that_share_the_transformer_in_two_threads() -> None:
    """One pipeline a thread, sharing weights, is what the error recommends; each has its own handle or none."""
    pipe = build("flux")
    patched, plain = (type(pipe).from_pipe(pipe, scheduler=copy.deepcopy(pipe.scheduler)) for _ in range(2))
    for sibling in (patched, plain):
        sibling.set_progress_bar_config(disable=True)
    stock, watch = run("flux", pipe, 4), Watch()
    with patch(pipe, [Keep(0, 2)]), patch(patched, [watch, Keep(0, 1, 2)]):
        alone = run("flux", pipe, 4), run("flux", patched, 4)
        counts = watch.counts.copy()
        for _ in range(3):
            results = in_threads(
                lambda: run("flux", pipe, 4), lambda: run("flux", patched, 4), lambda: run("flux", plain, 4)
            )
            for result, expected in zip(results, (*alone, stock)):
                assert isinstance(result, torch.Tensor), result
                assert torch.equal(result, expected)
    assert watch.counts["attention"] == 4 * counts["attention"]
