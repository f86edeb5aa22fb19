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


def test_stacks_that_take_turns_are_refused() -> None:
    """Latte: a spatial block, a temporal block, and so on; skipped one by one they would be off by a third."""
    pipe = Bare("LatteTransformer3DModel").build()
    before = pipe(3)[0]
    with patch(pipe, [Watch()]):
        assert torch.equal(pipe(3)[0], before), "watching is exact all the same"
    with (
        patch(pipe, [Keep(0)]),
        pytest.raises(RefusedError, match=r"'transformer_blocks' and 'temporal_.*' take turns"),
    ):
        pipe(3)
    assert torch.equal(pipe(3)[0], before)


def _sample(output: Any) -> Any:
    while isinstance(output, (list, tuple, dict)):
        output = output[0]
    return output
