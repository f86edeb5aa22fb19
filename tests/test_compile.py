"""Contract 9: compiled blocks stay compiled, in either order, with every feature on."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from probes import Formula, Keep, Scale, Watch, difference
from tiny import build, run
from torch._dynamo.utils import counters

import chitu_diffusion
from chitu_hooks import Feature, patch

LAYERS = 10
"""More than torch's limit of 8 graphs a function: one graph a layer fails."""
STEPS = 4
COMPILED = ("flux", "flux2_klein", "qwen", "sd3", "zimage", "wan", "pixart", "lumina2")


class Look(Watch):
    """Watches every seam; its attention call leaves no trace, since it is traced."""

    def attention(self, q_BSHD: torch.Tensor, k_BTHD: torch.Tensor, v_BTHD: torch.Tensor, ctx: Any) -> None:
        ctx.kind(q_BSHD.shape[1], k_BTHD.shape[1])
        return None


def swap() -> list[Feature]:
    """Another kernel, and a factor that makes its action plain to see."""
    return [Scale(0.5), Formula()]


SETS: dict[str, Any] = {
    "watch": lambda: [Look()],
    "cache": lambda: [Keep(0, 1, 3)],
    "attention": swap,
    "all": lambda: [Look(), Keep(0, 1, 3), *swap()],
}
ORDERS = ("compile first", "patch first")
LOSSY = ("cache", "attention", "all")


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def compile_blocks(transformer: Any, backend: str = "eager") -> None:
    if getattr(transformer, "_repeated_blocks", None):
        transformer.compile_repeated_blocks(fullgraph=True, backend=backend)
        return
    for stack in transformer.children():
        for block in stack if isinstance(stack, torch.nn.ModuleList) else ():
            block.compile(fullgraph=True, backend=backend)


@functools.cache
def stock(name: str) -> tuple[torch.Tensor, int]:
    """Output and number of graphs of the unhooked model with compiled blocks."""
    torch._dynamo.reset()
    counters.clear()
    pipe = build(name, LAYERS)
    compile_blocks(pipe.transformer)
    output, count = run(name, pipe, STEPS), graphs()
    torch._dynamo.reset()
    counters.clear()
    return output, count


@functools.cache
def hooked_eagerly(name: str, features: str) -> torch.Tensor:
    """Output under the features `SETS[features]`, nothing compiled."""
    pipe = build(name, LAYERS)
    with patch(pipe, SETS[features]()):
        return run(name, pipe, STEPS)


def compiled_and_patched(name: str, features: list[Feature], order: str) -> tuple[Any, Any]:
    pipe = build(name, LAYERS)
    if order == "compile first":
        compile_blocks(pipe.transformer)
    handle = patch(pipe, features)
    if order == "patch first":
        compile_blocks(pipe.transformer)
    return pipe, handle


CASES = [(name, "all", "compile first") for name in COMPILED]
CASES += [(name, "all", "patch first") for name in ("flux", "sd3")]
CASES += [(name, features, "patch first") for name in ("wan", "pixart") for features in ("watch", "cache", "attention")]
EVERY = [
    (name, features, ORDERS[(row + column) % 2])
    for row, name in enumerate(COMPILED)
    for column, features in enumerate(SETS)
]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in EVERY if case not in CASES]
"""Every set on every pipeline, every order of every pipeline and of every set; what is not slow has all of them once."""


@pytest.mark.parametrize(("name", "features", "order"), CASES)
def test_compiled_blocks_take_no_further_graph(name: str, features: str, order: str) -> None:
    plain, allowed = stock(name)
    expected = hooked_eagerly(name, features)
    assert torch.equal(expected, plain) != (features in LOSSY), "the features act, or watch only"
    pipe, _ = compiled_and_patched(name, SETS[features](), order)

    assert torch.equal(run(name, pipe, STEPS), expected)
    assert 0 < graphs() <= allowed, "none a step, none a layer"
    first = graphs()
    assert torch.equal(run(name, pipe, STEPS), expected)
    assert graphs() == first, "none in a second generation"


@pytest.mark.parametrize("name", ("flux", "sd3", "wan"))
def test_undo_leaves_the_compiled_call(name: str) -> None:
    plain, allowed = stock(name)
    pipe, handle = compiled_and_patched(name, SETS["all"](), "compile first")
    assert not torch.equal(run(name, pipe, STEPS), plain)
    handle.undo()
    assert torch.equal(run(name, pipe, STEPS), plain)
    assert graphs() <= 2 * allowed, "the graph without features, once"
    both = graphs()
    assert torch.equal(run(name, pipe, STEPS), plain)
    assert graphs() == both


@pytest.mark.parametrize("name", ("wan", "pixart"))
def test_patching_many_times_does_not_reach_the_graph_limit(name: str) -> None:
    plain, _ = stock(name)
    pipe = build(name, LAYERS)
    compile_blocks(pipe.transformer)
    for _ in range(10):
        with patch(pipe, SETS["all"]()):
            assert not torch.equal(run(name, pipe, 2), plain)
    assert torch.equal(run(name, pipe, STEPS), plain)


@pytest.mark.parametrize("name", ("wan", "sd3"))
def test_a_sibling_of_a_compiled_pipe_runs_unhooked(name: str) -> None:
    plain, allowed = stock(name)
    pipe, handle = compiled_and_patched(name, SETS["all"](), "compile first")
    sibling = type(pipe).from_pipe(pipe)
    sibling.set_progress_bar_config(disable=True)
    for _ in range(2):
        assert not torch.equal(run(name, pipe, STEPS), plain)
        assert torch.equal(run(name, sibling, STEPS), plain)
    assert graphs() <= 2 * allowed
    handle.undo()


def test_a_lora_added_later_acts() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=4, init_lora_weights=False, target_modules=["to_q", "to_k", "to_v"])

    def add(pipe: Any) -> None:
        torch.manual_seed(1)
        pipe.transformer.add_adapter(config)

    eager = build("flux", LAYERS)
    add(eager)
    with patch(eager, SETS["all"]()):
        expected = run("flux", eager, STEPS)
    pipe, _ = compiled_and_patched("flux", SETS["all"](), "compile first")
    without = run("flux", pipe, STEPS)
    add(pipe)
    assert difference(run("flux", pipe, STEPS), expected) < 1e-5
    assert difference(without, expected) > 1e-3


@pytest.mark.parametrize("name", ("wan", "flux2_klein"))
def test_new_sizes_cost_what_they_cost_the_stock_model(name: str) -> None:
    sizes = (32, 64, 48)
    counts = []
    for features in ([], SETS["all"]()):
        torch._dynamo.reset()
        counters.clear()
        pipe = build(name, LAYERS)
        compile_blocks(pipe.transformer)
        with patch(pipe, features):
            for size in sizes:
                run(name, pipe, 2, height=size, width=size)
        counts.append(graphs())
    assert counts[1] <= counts[0]


def test_inductor_gives_the_eager_output() -> None:
    expected = hooked_eagerly("flux", "all")
    pipe = build("flux", LAYERS)
    compile_blocks(pipe.transformer, "inductor")
    with patch(pipe, SETS["all"]()):
        assert difference(run("flux", pipe, STEPS), expected) < 1e-5


@pytest.mark.parametrize(
    ("name", "order"), (("flux", "compile first"), ("sd3", "patch first"), ("wan", "compile first"))
)
def test_the_shipped_cache_and_kernel_compile(name: str, order: str) -> None:
    def patched(pipe: Any) -> Any:
        cache = chitu_diffusion.Static(steps=(0, 1, 3))
        return chitu_diffusion.patch(pipe, cache=cache, attention="sdpa_math")

    eager = build(name, LAYERS)
    with patched(eager):
        expected = run(name, eager, STEPS)
    plain, allowed = stock(name)
    pipe = build(name, LAYERS)
    if order == "compile first":
        compile_blocks(pipe.transformer)
    handle = patched(pipe)
    if order == "patch first":
        compile_blocks(pipe.transformer)
    for _ in range(2):
        assert torch.equal(run(name, pipe, STEPS), expected)
        assert handle.report().features[-1]["kernel"] == "sdpa_math"
        assert graphs() <= allowed
    handle.undo()
    assert difference(plain, expected) > 1e-3
    assert torch.equal(run(name, pipe, STEPS), plain)
