"""Stacks and streams without a hook map: inferred from the first computed call, at no extra cost."""

from __future__ import annotations

import pytest
import torch
from matrix.table import Bare
from probes import Watch
from stacks import STACKS
from tiny import ALL, build, run
from variants import wan_two_experts
from variants_more import two_models

from chitu_hooks import infer, patch
from chitu_hooks.infer import _carriers


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
        open_lines = handle.report().not_inferred
        assert open_lines[0].endswith('guidance="batched" or guidance="sequential"')
        trunk = {stack.path for stack in handle.sites.stacks if not stack.refiner}
        assert {path for path in STACKS[name] if any(f'Stack("{path}", …' in line for line in open_lines)} == trunk


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


def test_streams_of_one_length_are_not_mixed_up() -> None:
    """HiDream cuts the text and puts other tokens in its place; an image of as many tokens is known by being the output."""
    image, text, other, temb = (torch.zeros(1, 8, 4) for _ in range(4))
    given = {"hidden_states": other, "encoder_hidden_states": other, "temb": temb}
    values = {"hidden_states": image, "encoder_hidden_states": text.clone(), "temb": temb}
    assert _carriers((image, text), values, given) == ("hidden_states", "encoder_hidden_states")
    assert _carriers((image.clone(), text), values, given) is None, "two candidates for two outputs"


def test_a_stack_that_stays_unknown_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wan-VACE's control blocks return what is no argument of theirs: after two calls nothing of them is copied any more."""
    pipe = Bare("WanVACETransformer3DModel").build()
    with patch(pipe, [Watch()]) as handle:
        pipe(1)
        unknown = next(stack for stack in handle.sites.stacks if stack.path == "vace_blocks")
        assert (unknown.returns, unknown.tries) == (None, 2)
        copies: list[object] = []
        monkeypatch.setattr(infer, "snapshot", copies.append)
        pipe(2)
        assert copies == []
        told = handle.report().notes[-1]
        assert told.startswith(
            "transformer.vace_blocks: streams not known, its blocks are always run; write them: Stack("
        )


def test_denoisers_are_all_found() -> None:
    """A second expert, and a model of its own for the unconditional branch."""
    with patch(two_models().pipe, [Watch()]) as handle:
        assert [site.name for site in handle.sites.denoisers] == ["transformer", "unconditional_transformer"]
    with patch(wan_two_experts().pipe, [Watch()]) as handle:
        assert [site.name for site in handle.sites.denoisers] == ["transformer", "transformer_2"]


def test_stacks_of_one_kind_of_tokens_come_before_the_trunk() -> None:
    """What such a stack gets from its text hardly changes from step to step, so no cache may decide by it."""
    with patch(Bare("Flux3Transformer2DModel").build()) as handle:
        refiners = {stack.path: stack.refiner for stack in handle.sites.stacks}
    assert refiners == {"txt_mode_blocks": True, "single_transformer_blocks": False}
