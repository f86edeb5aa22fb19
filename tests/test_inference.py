"""Stacks and streams without a hook map: inferred from the first computed call, at no extra cost."""

from __future__ import annotations

import pytest
from probes import Watch
from stacks import STACKS
from tiny import ALL, build, run

from chitu_hooks import patch


@pytest.mark.parametrize("name", STACKS)
def test_inferred_stacks_are_those_read_from_the_model(name: str) -> None:
    pipe, calls = build(name), []
    pipe.transformer.register_forward_hook(lambda *_: calls.append(1))
    with patch(pipe, [Watch()]) as handle:
        assert not calls, "nothing is run at patch time"
        assert handle.hook_map.source == "inferred"
        assert {stack.path for stack in handle.sites.stacks} == set(STACKS[name])
        assert all(stack.returns is None for stack in handle.sites.stacks)
        run(name, pipe, steps=2)
        assert len(calls) == 2 * ALL[name].branches, "inference costs no extra call"
        assert {stack.path: stack.returns for stack in handle.sites.stacks} == STACKS[name]
        assert not handle.report().notes


@pytest.mark.parametrize("name", STACKS)
def test_long_stacks_are_inferred_alike(name: str) -> None:
    pipe = build(name, layers=5)
    with patch(pipe, [Watch()]) as handle:
        run(name, pipe, steps=2)
        assert {stack.path: stack.returns for stack in handle.sites.stacks} == STACKS[name]


def test_stacks_of_one_block() -> None:
    """No next block shows where the output goes: known if one tensor comes back like the first argument."""
    pipe = build("wan", layers=1)
    with patch(pipe, [Watch()]) as handle:
        run("wan", pipe, steps=2)
        assert handle.sites.stacks[0].returns == ("hidden_states",)
    pipe = build("sd3", layers=1)
    with patch(pipe, [Watch()]) as handle:
        run("sd3", pipe, steps=2)
        assert handle.sites.stacks[0].returns is None
        assert any("transformer.transformer_blocks" in note for note in handle.report().notes)
