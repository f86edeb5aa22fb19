"""Each strategy against an independent reference: the algorithm in a few lines of plain torch around the stock model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from caches import STEPS, Log
from tiny import ALL, build, run
from torch import nn

from chitu_diffusion import (
    PAB,
    BlockDance,
    EasyCache,
    FBCache,
    MagCache,
    Static,
    TaylorSeer,
    TeaCache,
    patch,
)
from chitu_diffusion.flexcache.schedule import growing, ramped, stretched, uniform

pytestmark = pytest.mark.filterwarnings("ignore::chitu_hooks.ChituWarning")


class Whole(nn.Module):
    """In place of a stack: ``run(state, blocks, x, rest)`` decides what becomes of the image stream `x`."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        object.__setattr__(self, "run", run)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


def reference(name: str, algorithm: Callable[..., Any], path: str, layers: int = 4) -> torch.Tensor:
    """`algorithm(memory, position, compute, args, kwargs)` in place of the stack at `path`, with a memory for each branch.

    `compute(start, stop, args, kwargs)` runs blocks on the arguments and returns what the last one returns.
    """
    pipe = build(name, layers)
    blocks, memories, calls = list(getattr(pipe.transformer, path)), {}, 0

    def compute(start: int, stop: int, args: Any, kwargs: Any) -> Any:
        result = None
        for block in blocks[start:stop]:
            result = block(*args, **kwargs)
            args, kwargs = handed_on(result, args, kwargs)
        return result

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        position, branch = divmod(calls, ALL[name].branches)
        calls += 1
        return algorithm(memories.setdefault(branch, {}), position, compute, args, kwargs)

    setattr(pipe.transformer, path, nn.ModuleList([Whole(forward)]))
    return run(name, pipe, STEPS)


def handed_on(result: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of the next block: (text, image) pairs for SD3, a bare image elsewhere."""
    if isinstance(result, tuple):
        return args, {**kwargs, "encoder_hidden_states": result[0], "hidden_states": result[1]}
    return ((result, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": result})


def image(args: Any, kwargs: Any) -> torch.Tensor:
    return kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]


def picture(result: Any) -> torch.Tensor:
    return result[1] if isinstance(result, tuple) else result


# Pipelines with one stack, so that a reference can stand for it as one module.
PATHS = {"wan": "blocks", "sd3": "transformer_blocks", "pixart": "transformer_blocks", "ltx": "transformer_blocks"}


def result_of(stream: torch.Tensor, like: Any) -> Any:
    """What the stack returns: SD3's last block returns no text."""
    return (None, stream) if isinstance(like, tuple) else stream


@pytest.mark.parametrize(("name", "threshold"), [("wan", 0.1), ("sd3", 0.4), ("pixart", 0.2)])
def test_fbcache(name: str, threshold: float) -> None:
    """Front 1, back 1, threshold on the relative change of what the first block adds."""
    decisions: list[bool] = []

    def algorithm(m: dict[str, Any], position: int, compute: Any, args: Any, kwargs: Any) -> Any:
        x = image(args, kwargs).clone()
        first = compute(0, 1, args, kwargs)
        added, after = picture(first) - x, picture(first).clone()
        args, kwargs = handed_on(first, args, kwargs)
        near = m and ((added - m["added"]).abs().sum((1, 2)) / m["added"].abs().sum((1, 2))).max() < threshold
        decisions.append(bool(near))
        if not near:
            middle = compute(1, 3, args, kwargs)
            entry_text = kwargs.get("encoder_hidden_states")
            m.update(added=added, middle=picture(middle) - after)
            if isinstance(middle, tuple):
                m["text"] = middle[0] - entry_text
        elif isinstance(first, tuple):
            middle = (kwargs["encoder_hidden_states"] + m["text"], after + m["middle"])
        else:
            middle = after + m["middle"]
        args, kwargs = handed_on(middle, args, kwargs)
        return compute(3, 4, args, kwargs)

    expected = reference(name, algorithm, PATHS[name])
    pipe, log = build(name, 4), Log()
    with patch(pipe, cache=FBCache(threshold=threshold, back=1), features=(log,)):
        result = run(name, pipe, STEPS)
    assert [skipped for *_, skipped in log.calls] == decisions
    assert 0 < log.hits < len(decisions) - ALL[name].branches
    assert torch.equal(result, expected)


@pytest.mark.parametrize(("order", "damping"), [(0, 1.0), (1, 1.0), (2, 1.0), (3, 1.0), (1, 0.5), (2, 0.5), (1, 0.0)])
@pytest.mark.parametrize("name", ["wan", "ltx"])
def test_taylorseer(name: str, order: int, damping: float) -> None:
    """Finite differences of the residual, as the paper writes them; damped, only a part of the way."""

    def algorithm(m: dict[str, Any], position: int, compute: Any, args: Any, kwargs: Any) -> Any:
        x = image(args, kwargs).clone()
        if position < 3 or (position - 2) % 3 == 0:
            result = compute(0, 4, args, kwargs)
            new = [result - x]
            for old in m.get("d", [])[:order]:
                new.append((new[-1] - old) * (1 / (position - m["at"])))
            m.update(d=new, at=position)
            return result
        k, value = position - m["at"], m["d"][0]
        for q, change in enumerate(m["d"][1:], 1):
            value = torch.add(value, change, alpha=(damping * k) ** q / [1, 1, 2, 6][q])
        return x + value

    expected = reference(name, algorithm, PATHS[name])
    pipe, log = build(name, 4), Log()
    with patch(pipe, cache=TaylorSeer(interval=3, ramp=False, order=order, damping=damping), features=(log,)):
        result = run(name, pipe, STEPS)
    assert log.computed() == [0, 1, 2, 5, 8]
    assert torch.equal(result, expected)


@pytest.mark.parametrize("name", ["wan", "ltx"])
def test_taylorseer_on_the_last_feature(name: str) -> None:
    def algorithm(m: dict[str, Any], position: int, compute: Any, args: Any, kwargs: Any) -> Any:
        if position < 3 or (position - 2) % 3 == 0:
            result = compute(0, 4, args, kwargs)
            slope = [(result - m["y"]) * (1 / (position - m["at"]))] if m and not m.get("first") else []
            m.update(y=result.clone(), at=position, slope=slope, first=name == "ltx" and position == 0)
            return result
        return torch.add(m["y"], m["slope"][0], alpha=position - m["at"])

    expected = reference(name, algorithm, PATHS[name])
    pipe = build(name, 4)
    with patch(pipe, cache=TaylorSeer(interval=3, ramp=False, order=1, damping=1.0, of="feature")) as handle:
        result = run(name, pipe, STEPS)
        assert handle.report().features[0]["hits"] == 5 * ALL[name].branches
    assert torch.equal(result, expected)


def test_forecasting_block_by_block_is_forecasting_their_sum() -> None:
    """What TaylorSeer's memory-hungry form computes for the residuals of blocks, and the reason for the lean form."""
    torch.manual_seed(0)
    steps = torch.randn(3, 5, 2, 7)  # (computed step, block, token, channel)
    slope = steps[2] - steps[1]
    assert torch.allclose((steps[2] + 2 * slope).sum(0), steps[2].sum(0) + 2 * slope.sum(0), atol=1e-6)


@pytest.mark.parametrize(("forecast", "rise"), [("linear", 1.0), ("damped", 0.5)])
def test_static_forecasts(forecast: str, rise: float) -> None:
    computed = (0, 1, 3, 6)

    def algorithm(m: dict[str, Any], position: int, compute: Any, args: Any, kwargs: Any) -> Any:
        x = image(args, kwargs).clone()
        if position in computed:
            result = compute(0, 4, args, kwargs)
            residual = result - x
            m["slope"] = (residual - m["r"]) * (1 / (position - m["at"])) if m else 0 * residual
            m.update(r=residual, at=position)
            return result
        return x + torch.add(m["r"], m["slope"], alpha=rise * (position - m["at"]))

    expected = reference("wan", algorithm, "blocks")
    with patch(build("wan", 4), cache=Static(steps=computed, forecast=forecast)) as handle:
        assert torch.equal(run("wan", handle.pipe, STEPS), expected)


@pytest.mark.parametrize("name", ["flux", "sd3", "wan", "qwen", "zimage", "pixart"])
def test_easycache(name: str) -> None:
    """Around the stock transformer's forward: output = input + (output - input) of the last computed call."""
    pipe, memories, decisions, calls = build(name), {}, [], 0
    stock, threshold, warmup = pipe.transformer.forward, 0.6, 3
    flat = lambda value: torch.stack(value) if isinstance(value, list) else value  # noqa: E731

    def per_sample(value: torch.Tensor) -> torch.Tensor:
        return value.abs().flatten(1).sum(1)

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        position, branch = divmod(calls, ALL[name].branches)
        calls += 1
        m = memories.setdefault(branch, {"acc": 0})
        x = flat(args[0] if args else kwargs.get("hidden_states")).clone()
        if "k" in m and "x" in m and warmup <= position < STEPS - 1:
            m["acc"] = m["acc"] + m["k"] * per_sample(x - m["x"]) / per_sample(m["out"])
            skip = m["acc"].max() < threshold
        else:
            skip = False
        m["x"] = x
        decisions.append(bool(skip))
        if skip:
            out, same = m["out"].clone(), m["out"].shape[1]
            out[:, : x.shape[1]] += (x - m["at"])[:, :same] if x.dim() == 4 else x - m["at"]
            return (list(out) if isinstance(args and args[0], list) else out,)
        result = stock(*args, **kwargs)
        out = flat(result[0]).clone()
        if "out" in m:
            m["k"] = per_sample(out - m["out"]) / per_sample(x - m["at"])
        m.update(out=out, at=x, acc=0)
        return result

    pipe.transformer.forward = forward
    expected = run(name, pipe, STEPS)
    pipe, log = build(name), Log()
    with patch(pipe, cache=EasyCache(threshold=threshold, warmup=warmup), features=(log,)):
        result = run(name, pipe, STEPS)
    assert [skipped for *_, skipped in log.calls] == decisions
    assert 0 < sum(decisions) < (STEPS - 4) * ALL[name].branches + 1
    assert torch.equal(result, expected)


@pytest.mark.parametrize(("name", "threshold"), [("wan", 0.15), ("pixart", 0.4)])
def test_teacache(name: str, threshold: float) -> None:
    """Official pseudocode, with the trunk's input as the signal; the previous signal is that of every step."""
    decisions: list[bool] = []

    def algorithm(m: dict[str, Any], position: int, compute: Any, args: Any, kwargs: Any) -> Any:
        x = image(args, kwargs).clone()
        if m and position < STEPS - 1:
            changes = (x - m["x"]).abs().sum((1, 2)) / m["x"].abs().sum((1, 2))
            m["acc"] = m["acc"] + 2.0 * changes**2 + 0.5 * changes
            skip = bool(m["acc"].max() < threshold)
        else:
            skip = False
        m["x"] = x
        decisions.append(skip)
        if skip:
            return x + m["r"]
        result = compute(0, 4, args, kwargs)
        m.update(r=result - x, acc=0)
        return result

    expected = reference(name, algorithm, PATHS[name])
    pipe, log = build(name, 4), Log()
    with patch(pipe, cache=TeaCache(threshold=threshold, coefficients=(2.0, 0.5, 0.0)), features=(log,)):
        result = run(name, pipe, STEPS)
    assert [skipped for *_, skipped in log.calls] == decisions
    assert 0 < log.hits < len(decisions) - 2 * ALL[name].branches
    assert torch.equal(result, expected)


@pytest.mark.parametrize("name", ["wan", "sd3", "pixart"])
def test_blockdance(name: str) -> None:
    """From the third position on, in groups of three: blocks 2 and 3 start from what block 1 returned."""

    def algorithm(m: dict[str, Any], position: int, compute: Any, args: Any, kwargs: Any) -> Any:
        if position in (3, 4, 6, 7, 9):
            result = tuple(t.clone() for t in m["front"]) if isinstance(m["front"], tuple) else m["front"].clone()
        else:
            result = compute(0, 2, args, kwargs)
            m["front"] = tuple(t.clone() for t in result) if isinstance(result, tuple) else result.clone()
        args, kwargs = handed_on(result, args, kwargs)
        return compute(2, 4, args, kwargs)

    expected = reference(name, algorithm, PATHS[name])
    pipe, log = build(name, 4), Log()
    with patch(pipe, cache=BlockDance(boundary=0.5, begin=0.2, end=1.0, group=3), features=(log,)) as handle:
        result = run(name, pipe, STEPS)
        flops = handle.report().features[-1]["flops"]
    assert log.computed() == [0, 1, 2, 5, 8]
    assert torch.equal(result, expected)
    assert 0.2 < flops["saved"] / flops["full"] < 0.3, "half of the blocks in half of the steps"


@pytest.mark.parametrize("name", ["flux", "wan", "sd3", "pixart"])
def test_pab(name: str) -> None:
    """Around torch's own attention: in the window every second step returns, layer by layer, what the one before returned."""
    stock, kept, order = torch.nn.functional.scaled_dot_product_attention, {}, {"call": -1, "layer": 0}
    pipe = build(name)

    def attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        position, branch = divmod(order["call"], ALL[name].branches)
        key = (branch, order["layer"])
        order["layer"] += 1
        if position not in (2, 4, 6, 8):
            kept[key] = stock(*args, **kwargs).clone()
        return kept[key].clone()

    def begins(*_: Any) -> None:
        order.update(call=order["call"] + 1, layer=0)

    hook = pipe.transformer.register_forward_pre_hook(begins)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
        expected = run(name, pipe, STEPS)
    hook.remove()
    log = Log()
    with patch(pipe, cache=PAB(interval=2, begin=0.1, end=0.9), features=(log,)):
        result = run(name, pipe, STEPS)
    assert log.computed() == [0, 1, 3, 5, 7, 9]
    assert torch.equal(result, expected)


def magcache_schedule(ratios: list[float], threshold: float, most: int, retention: float) -> list[int]:
    """Official pseudocode: the positions that are computed."""
    steps, product, error, run, computed = len(ratios) + 1, 1.0, 0.0, 0, []
    for i in range(steps):
        if i >= max(1, int(retention * steps + 0.5)):
            product *= ratios[i - 1]
            error, run = error + abs(1 - product), run + 1
            if error < threshold and run <= most:
                continue
        computed.append(i)
        product, error, run = 1.0, 0.0, 0
    return computed


@pytest.mark.parametrize("name", ["flux", "wan"])
@pytest.mark.parametrize(("threshold", "most"), [(0.06, 3), (0.24, 5), (0.02, 2)])
def test_magcache(name: str, threshold: float, most: int) -> None:
    ratios = [1.2, 1.05, 1.02, 0.99, 1.01, 0.97, 0.98, 0.95, 0.9]
    computed = magcache_schedule(ratios, threshold, most, 0.2)
    pipe, log = build(name), Log()
    params = MagCache(ratios=tuple(ratios), threshold=threshold, max_consecutive=most)
    with patch(pipe, cache=params, features=(log,)):
        result = run(name, pipe, STEPS)
    assert log.computed() == computed and 1 < len(computed) < STEPS
    with patch(pipe, cache=Static(steps=tuple(computed))):
        assert torch.equal(run(name, pipe, STEPS), result)


def test_gaps_of_taylorseer_grow_to_the_interval() -> None:
    for warmup, interval in ((1, 1), (2, 2), (4, 3), (3, 5), (1, 8)):
        computed, gap = list(range(warmup)), min(2, interval)
        while computed[-1] + gap < 60:
            computed.append(computed[-1] + gap)
            gap = min(gap + 1, interval)
        assert [i for i in range(60) if i < warmup or ramped(i, warmup, interval)] == computed
    pipe, log = build("wan"), Log()
    with patch(pipe, cache=TaylorSeer(warmup=2, interval=3), features=(log,)):
        run("wan", pipe, STEPS)
    assert log.computed() == [0, 1, 3, 6, 9]


def test_schedules() -> None:
    for steps in range(1, 60):
        for budget in range(1, steps + 3):
            for make in (uniform, growing):
                found = make(budget, steps)
                assert len(set(found)) == len(found) == min(budget, steps)
                assert found[0] == 0 and list(found) == sorted(found)
                assert budget == 1 or found[-1] == steps - 1
    gaps = [b - a for a, b in zip(growing(10, 50), growing(10, 50)[1:])]
    assert gaps[0] == 1 < gaps[-1] and gaps == sorted(gaps)
    assert stretched((0, 1, 3, 49), 50, 50) == (0, 1, 3, 49)
    assert stretched((0, 1, 3, 7, 14, 28, 49), 50, 25) == (0, 1, 3, 7, 14, 24)
