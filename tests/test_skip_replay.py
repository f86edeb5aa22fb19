"""The same denoiser call, computed and then skipped, gives the same output: the residual is all that the trunk adds."""

from __future__ import annotations

from typing import Any

import pytest
from probes import SdpaCounter, difference
from stacks import STACKS
from tiny import build, run

from chitu_hooks import Feature, patch


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


def _sample(output: Any) -> Any:
    while isinstance(output, (list, tuple, dict)):
        output = output[0]
    return output
