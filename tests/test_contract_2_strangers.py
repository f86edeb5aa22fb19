"""Contract 2: somebody else wraps on top after patching; ours becomes a pass-through, and is reported."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from probes import Scale, Watch, every
from tiny import build, run

from chitu_hooks import ChituWarning, Feature, patch


def wrap(module: torch.nn.Module) -> list[int]:
    """Put a plain function in front of the module's call, as a library would that we know nothing of."""
    inner, calls = module._compiled_call_impl, []

    def stranger(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return inner(*args, **kwargs)

    module._compiled_call_impl = stranger
    return calls


@pytest.mark.parametrize("where", ["transformer", "block"])
def test_a_stranger_on_top(where: str) -> None:
    pipe = build("flux")
    stock = run("flux", pipe, 2)
    # A stranger in front of the whole denoiser may be a compiler, so features that need blocks refuse there.
    watch = Watch() if where == "block" else Calls()
    handle = patch(pipe, [watch, Scale()])
    acted = run("flux", pipe, 2)
    seen = watch.counts.copy()
    module = pipe.transformer if where == "transformer" else pipe.transformer.transformer_blocks[1]
    calls = wrap(module)
    assert torch.equal(run("flux", pipe, 2), acted)
    assert not torch.equal(acted, stock)
    assert len(calls) == 4
    again = watch.counts - seen
    assert again["denoiser_in"] == 4, "hooked once, not once more on top of the stranger"
    assert again["block_in"] == (4 * len(handle.sites.blocks) if where == "block" else 0)
    with pytest.warns(ChituWarning, match=type(module).__name__):
        handle.undo()
    assert any(type(module).__name__ in note for note in handle.report().notes)
    assert torch.equal(run("flux", pipe, 2), stock)
    assert len(calls) == 8, "the stranger's wrapper is still in place"
    assert watch.counts - seen == again, "and ours below it only passes through"


class Calls(Feature):
    name = "calls"

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def denoiser_in(self, call: Any) -> None:
        self.counts["denoiser_in"] += 1


@pytest.mark.parametrize("order", ["stranger first", "stranger last"])
def test_a_stranger_between_two_generations_and_undo(order: str) -> None:
    """The stranger goes before we do, or after: nothing of either is left."""
    pipe = build("flux")
    stock = run("flux", pipe, 2)
    block = pipe.transformer.transformer_blocks[0]
    handle = patch(pipe, [Watch()])
    shim = block._compiled_call_impl
    wrap(block)
    if order == "stranger first":
        block._compiled_call_impl = shim
        handle.undo()
        assert not handle.report().notes
    else:
        with pytest.warns(ChituWarning):
            handle.undo()
        block._compiled_call_impl = None
    assert torch.equal(run("flux", pipe, 2), stock)


def test_patching_on_top_of_a_stranger() -> None:
    pipe = build("flux")
    stock = run("flux", pipe, 2)
    module = pipe.transformer.transformer_blocks[0]
    calls = []

    def stranger(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return module._call_impl(*args, **kwargs)

    module._compiled_call_impl = stranger
    with patch(pipe, [Watch(), every()]):
        assert module._compiled_call_impl is not stranger
        assert torch.equal(run("flux", pipe, 2), stock)
    assert module._compiled_call_impl is stranger
    assert len(calls) == 4


def test_a_processor_replaced_after_patching() -> None:
    """Users set processors at any time; the new one is hooked from the next generation on, and given back."""
    pipe, watch = build("flux"), Watch()
    handle = patch(pipe, [watch])
    run("flux", pipe, 2)
    seen = watch.counts["attention"]
    attn = pipe.transformer.transformer_blocks[0].attn
    stock_class = type(build("flux").transformer.transformer_blocks[0].attn.processor)
    old, new = attn.processor, stock_class()
    attn.set_processor(new)
    run("flux", pipe, 2)
    assert watch.counts["attention"] == 2 * seen
    handle.undo()
    assert attn.processor is new
    assert type(new) is type(old) is stock_class
    assert not vars(new).keys() - vars(stock_class()).keys()


def test_a_class_changed_after_patching() -> None:
    pipe = build("flux")
    handle = patch(pipe, [Watch()])

    class Mine(type(pipe)):  # type: ignore[misc]
        pass

    pipe.__class__ = Mine
    with pytest.warns(ChituWarning, match="class"):
        handle.undo()
    assert type(pipe) is Mine
    assert torch.equal(run("flux", pipe, 2), run("flux", build("flux"), 2))
