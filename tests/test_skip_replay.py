"""The same denoiser call, computed and then skipped, gives the same output: the residual is all that the trunk adds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from matrix.table import Bare
from probes import Keep, SdpaCounter, Watch, difference
from stacks import STACKS
from tiny import build, run

from chitu_hooks import Feature, RefusedError, patch


class SkipWhenTold(Feature):
    name = "skip when told"
    skips_trunk = True
    told = False

    def denoiser_in(self, call: Any) -> None:
        if self.told:
            call.skip_trunk()


@pytest.mark.parametrize("name", STACKS)
def test_replay_identity(name: str) -> None:
    pipe, seen = build(name), []
    recorder = pipe.transformer.register_forward_pre_hook(lambda _, a, k: seen.append((a, k)), with_kwargs=True)
    run(name, pipe, steps=2)
    recorder.remove()
    args, kwargs = seen[-1]
    skip = SkipWhenTold()
    with patch(pipe, [skip]) as handle, handle._engine.generate(pipe):
        for streams in ("inferred in this call", "known"):
            skip.told = False
            with SdpaCounter() as computed:
                one = pipe.transformer(*args, **kwargs)
            skip.told = True
            with SdpaCounter() as skipped:
                other = pipe.transformer(*args, **kwargs)
            assert skipped.calls < computed.calls, streams
            assert difference(_sample(other), _sample(one)) <= 1e-6, streams


@pytest.mark.parametrize("back", [0, 0.65], ids=["all of the trunk", "the front of the trunk"])
def test_stacks_that_take_turns_are_refused(back: float) -> None:
    """Latte: a spatial block, a temporal block, and so on; skipped one by one they would be off by a third.

    A front of the trunk would be blocks of the first stack only, since blocks are counted stack after stack.
    """
    pipe, cache = Bare("LatteTransformer3DModel").build(), Keep(0)
    cache.back = back
    before = pipe(3)[0]
    with patch(pipe, [Watch()]):
        assert torch.equal(pipe(3)[0], before), "watching is exact all the same"
    with patch(pipe, [cache]), pytest.raises(RefusedError, match=r"'transformer_blocks' and 'temporal_.*' take turns"):
        pipe(3)
    assert torch.equal(pipe(3)[0], before)


def test_a_part_of_the_trunk_is_counted_in_blocks_that_can_be_skipped() -> None:
    """VACE's own blocks cannot: of the 4 others, 0.65 are 3 and 1."""
    pipe, cache = Bare("WanVACETransformer3DModel").build(), Keep(0, 1, 2)
    cache.back = 0.65
    runs = [0] * 4
    for index, block in enumerate(pipe.transformer.blocks):
        block.register_forward_pre_hook(lambda *_, index=index: runs.__setitem__(index, runs[index] + 1))
    with patch(pipe, [cache]):
        pipe(5)
    assert runs == [6, 10, 10, 10], "two branches, and two of five steps skip the first block"


def _sample(output: Any) -> Any:
    while isinstance(output, (list, tuple, dict)):
        output = output[0]
    return output
