"""A denoiser compiled as a whole keeps the denoiser and the attention seam; features of the block seam are refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from probes import Formula, Keep, Scale, difference
from tiny import ALL, build, run

from chitu_hooks import Feature, GenerationError, RefusedError, patch

STEPS = 4


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Memo(Feature):
    """Replaces the output by the one before at odd steps: needs the denoiser seam only."""

    name = "memo"
    exactness = "lossy"

    def __init__(self) -> None:
        self.replaced = 0

    def denoiser_in(self, call: Any) -> Any:
        known = getattr(call.branch.memory(self), "sample", None)
        if call.step.position % 2 and known is not None:
            self.replaced += 1
            return known
        return None

    def denoiser_out(self, call: Any) -> None:
        call.branch.memory(self).sample = call.sample


def compile_in_place(pipe: Any) -> None:
    pipe.transformer.compile(backend="eager")


def compile_outside(pipe: Any) -> None:
    pipe.transformer = torch.compile(pipe.transformer, backend="eager")


WHOLE = pytest.mark.parametrize("compile_whole", (compile_in_place, compile_outside))
WHOLE_ORDER = pytest.mark.parametrize("order", ("compile first", "patch first"))


@WHOLE_ORDER
@WHOLE
@pytest.mark.parametrize("name", ("flux", pytest.param("sd3", marks=pytest.mark.slow)))
def test_a_denoiser_compiled_whole_keeps_denoiser_and_attention(name: str, compile_whole: Any, order: str) -> None:
    pipe = build(name)
    plain, transformer = run(name, pipe, STEPS), pipe.transformer
    with patch(pipe, [Memo(), Scale(0.5), Formula()]):
        expected = run(name, pipe, STEPS)
    if order == "compile first":
        compile_whole(pipe)
    memo = Memo()
    with patch(pipe, [memo, Scale(0.5), Formula()]):
        if order == "patch first":
            compile_whole(pipe)
        for generation in (1, 2):
            assert difference(run(name, pipe, STEPS), expected) < 1e-5
            assert memo.replaced == generation * ALL[name].branches * STEPS // 2
    assert difference(plain, expected) > 1e-3
    assert difference(run(name, pipe, STEPS), plain) < 1e-5
    pipe.transformer = transformer
    assert all("_chitu_attention" not in vars(p) for p in transformer.attn_processors.values())


def everything(pipe: Any) -> tuple[Any, ...]:
    inner = getattr(pipe.transformer, "_orig_mod", pipe.transformer)
    processors = [(type(p), dict(vars(p))) for p in inner.attn_processors.values()]
    return dict(vars(pipe)), type(pipe), dict(vars(inner)), processors


@WHOLE
def test_block_features_are_refused_on_a_denoiser_compiled_whole(compile_whole: Any) -> None:
    pipe = build("flux")
    plain = run("flux", pipe, STEPS)
    compile_whole(pipe)
    before = everything(pipe)
    with pytest.raises(RefusedError, match=r"keep: transformer is compiled as a whole"):
        patch(pipe, [Keep(0), Scale()])
    assert everything(pipe) == before
    assert difference(run("flux", pipe, STEPS), plain) < 1e-5


@WHOLE
def test_block_features_are_refused_once_the_denoiser_is_compiled_whole(compile_whole: Any) -> None:
    pipe = build("flux")
    plain = run("flux", pipe, STEPS)
    handle = patch(pipe, [Keep(0)])
    compile_whole(pipe)
    for _ in range(2):
        with pytest.raises(RefusedError, match=r"keep: transformer is compiled as a whole"):
            run("flux", pipe, STEPS)
    handle.undo()
    assert difference(run("flux", pipe, STEPS), plain) < 1e-5


@WHOLE
def test_a_denoiser_that_is_compiled_no_more_has_blocks_again(compile_whole: Any) -> None:
    pipe, cache = build("flux"), Keep(0)
    transformer = pipe.transformer
    with patch(pipe, [cache]):
        expected = run("flux", pipe, STEPS)
        compile_whole(pipe)
        with pytest.raises(RefusedError):
            run("flux", pipe, STEPS)
        pipe.transformer, transformer._compiled_call_impl = transformer, None
        assert torch.equal(run("flux", pipe, STEPS), expected)


def test_another_denoiser_is_not_taken_for_the_patched_one() -> None:
    pipe = build("flux")
    with patch(pipe, [Scale()]):
        pipe.transformer = build("flux", seed=1).transformer
        with pytest.raises(GenerationError, match="transformer was replaced by another FluxTransformer2DModel"):
            run("flux", pipe, STEPS)
    assert torch.equal(run("flux", pipe, STEPS), run("flux", build("flux", seed=1), STEPS))
