"""Contract 12: the hot path does no searching, no logging, and never waits for the device."""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from typing import Any

import pytest
import torch
from probes import Keep, Scale, Watch
from tiny import ALL, build, run
from torch import nn

from chitu_hooks import Feature, patch

STEPS = 5
WATCHED: tuple[tuple[Any, str], ...] = (
    (nn.Module, "named_modules"),
    (nn.Module, "named_children"),
    (nn.Module, "modules"),
    (nn.Module, "state_dict"),
    (torch.Tensor, "item"),
    (torch.Tensor, "tolist"),
    (torch.Tensor, "cpu"),
    (torch.Tensor, "__bool__"),
    (torch.Tensor, "__float__"),
    (torch.Tensor, "__int__"),
    (torch, "equal"),
    (inspect, "signature"),
    (logging.Logger, "_log"),
)


def count(name: str, pipe: Any, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Calls of each watched function between the second denoiser call and the last one: the first may infer."""
    counts: Counter[str] = Counter()
    calls, total = 0, STEPS * ALL[name].branches
    begin = 2 * ALL[name].branches  # every branch computed once, and skipped or computed once more

    def counting(label: str, original: Any) -> Any:
        def function(*args: Any, **kwargs: Any) -> Any:
            counts[label] += begin <= calls < total
            return original(*args, **kwargs)

        return function

    def tick(*_: Any) -> None:
        nonlocal calls
        calls += 1

    hook = pipe.transformer.register_forward_pre_hook(tick)
    with monkeypatch.context() as patched:
        for owner, attribute in WATCHED:
            patched.setattr(owner, attribute, counting(attribute, getattr(owner, attribute)))
        run(name, pipe, STEPS)
    hook.remove()
    assert calls == total
    return +counts


@pytest.mark.parametrize("name", ALL)
def test_steps_search_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = build(name)
    stock = count(name, pipe, monkeypatch)
    watch, cache = Watch(), Keep(0, 3)
    with patch(pipe, [watch, cache, Scale()]):
        first = count(name, pipe, monkeypatch)
        second = count(name, pipe, monkeypatch)
    assert watch.counts["attention"] and sum(cache.skips) == 2 * (STEPS - 2) * ALL[name].branches
    for hooked in (first, second):
        # A skipped block makes fewer calls than the stock one; none makes more.
        assert not hooked - stock, f"the hooked run does more: {hooked - stock}"


def test_layers_ask_only_features_that_replace_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Layers(Feature):
        def attention_layer(self, frame: Any, rest: Any) -> None:
            asked.append(frame.site.path)

    monkeypatch.setattr(Feature, "attention_layer", lambda *_: asked.append("in vain"))
    pipe, watch = build("flux"), Watch()
    with patch(pipe, [watch, Scale()]) as handle:
        run("flux", pipe, STEPS)
        assert watch.counts["attention"] and not asked
        with handle.also(Layers()):
            run("flux", pipe, 1)
        layers = [site.path for site in handle.sites.attention]
        assert asked == layers * ALL["flux"].branches


def test_the_counter_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Searches(Watch):
        def denoiser_in(self, call: Any) -> None:
            dict(call.denoiser.module.named_modules())

    pipe = build("flux")
    stock = count("flux", pipe, monkeypatch)
    with patch(pipe, [Searches()]):
        assert (count("flux", pipe, monkeypatch) - stock)["named_modules"] > 0
