"""The draft of a hook map: read from source, completed by a call, and equal to the maps that people wrote."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from tiny import TINY, build, run

from chitu_diffusion.adapters import registry
from chitu_diffusion.intake.draft import Draft, map_text, read_draft, read_order
from chitu_diffusion.intake.trial import Look, complete, see
from chitu_hooks import HookMap, Stack, load_hook_map, patch
from chitu_hooks.find import find_hook_map


def written(pipe: Any) -> HookMap:
    """The adapter that somebody wrote for `pipe`."""
    return next(hook_map for hook_map in registry() if type(pipe).__name__ in hook_map.pipelines)


def drafted(name: str, pipe: Any) -> Draft:
    draft = read_draft(pipe, find_hook_map(pipe, None, ()), name)
    return complete(pipe, draft, lambda: run(name, pipe, steps=2))


def plain(stacks: tuple[Stack, ...] | None, refiners: bool = True) -> set[Any]:
    return {
        (s.path, tuple(sorted(s.streams.items())), s.returns, s.order if "joint" in s.streams or len(s.streams) > 1 else (),
         s.refiner)
        for s in stacks or () if refiners or not s.refiner
    }  # fmt: skip


@pytest.mark.parametrize("name", TINY)
def test_a_call_shows_what_people_wrote(name: str) -> None:
    pipe = build(name)
    stock = run(name, pipe, steps=2)
    draft = drafted(name, pipe)
    wanted = written(pipe)
    assert plain(draft.hook_map.stacks) == plain(wanted.stacks)
    assert draft.hook_map.guidance == wanted.guidance
    assert [question for question in draft.questions if "one entry a token" not in question] == []
    assert torch.equal(run(name, pipe, steps=2), stock), "nothing of the trial is left"


@pytest.mark.parametrize("name", ["flux", "sd3", "qwen", "wan", "pixart", "auraflow", "chroma", "cogview4"])
def test_the_source_says_the_same_as_a_call(name: str) -> None:
    pipe = build(name)
    read = read_draft(pipe, find_hook_map(pipe, None, ()), name)
    assert plain(read.hook_map.stacks) == plain(drafted(name, pipe).hook_map.stacks)


@pytest.mark.parametrize("name", ["flux", "sd3", "zimage", "lumina2"])
def test_roles_come_from_what_moved(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without another sample nothing moves, and everything looks like text: the evidence is really used."""
    monkeypatch.setattr("chitu_diffusion.intake.trial.map_tensors", lambda value, function: value)
    pipe = build(name)
    assert plain(drafted(name, pipe).hook_map.stacks) != plain(written(pipe).stacks)


def test_the_orders_differ() -> None:
    assert read_order(build("flux").transformer) == ("text", "image")
    assert read_order(build("sd3").transformer) == ("image", "text")
    assert read_order(build("wan").transformer) == (), "cross attention has no order"


@pytest.mark.parametrize("name", TINY)
def test_the_text_is_the_map(name: str, tmp_path: Path) -> None:
    pipe = build(name)
    draft = drafted(name, pipe)
    path = tmp_path / "map.py"
    path.write_text(map_text(draft, "A model."))
    assert dataclasses.replace(load_hook_map(path), source="inferred") == draft.hook_map
    with patch(pipe, [Look(see(pipe, draft.hook_map, lambda: run(name, pipe, steps=1)), False)], hook_map=path):
        pass


def test_questions_stand_in_the_text(tmp_path: Path) -> None:
    questions = ("stack: what it returns cannot be read " * 6, "token order")
    draft = Draft(HookMap("x", ("XPipeline",), stacks=(Stack("blocks", {}, ()),)), questions)
    text = map_text(draft, "A model.")
    assert text.count("# Fill in: ") == 2
    assert max(len(line) for line in text.splitlines()) <= 120
    path = tmp_path / "map.py"
    path.write_text(text)
    assert load_hook_map(path) == draft.hook_map


def test_a_stack_whose_streams_cannot_be_read_is_left_to_inference() -> None:
    pipe = build("flux2_klein")
    read = read_draft(pipe, find_hook_map(pipe, None, ()), "flux2")
    stacks = {stack.path: stack for stack in read.hook_map.stacks or ()}
    assert stacks["transformer_blocks"].returns == ("text", "image")
    assert stacks["single_transformer_blocks"].returns == ()
    assert [q for q in read.questions if q.startswith("single_transformer_blocks: ")]


ALIGNED = {
    "flux": {"transformer_blocks": {"image_rotary_emb.0": "joint@0", "image_rotary_emb.1": "joint@0"}},
    "sd3": {"transformer_blocks": {}},
    "qwen": {
        "transformer_blocks": {
            "image_rotary_emb.0": "image@0", "image_rotary_emb.1": "text@0", "encoder_hidden_states_mask": "text@1",
        }
    },
    "lumina2": {"layers": {"image_rotary_emb": "joint@1"}, "noise_refiner": None},
    "cogview4": {"transformer_blocks": {"image_rotary_emb.0": "image@0", "image_rotary_emb.1": "image@0"}},
    "ltx": {"transformer_blocks": {"image_rotary_emb.0": "image@1", "image_rotary_emb.1": "image@1"}},
}  # fmt: skip


@pytest.mark.parametrize("name", ALIGNED)
def test_token_aligned_arguments(name: str) -> None:
    pipe = build(name)
    draft = read_draft(pipe, find_hook_map(pipe, None, ()), name)
    draft = complete(pipe, draft, lambda: run(name, pipe, steps=1, length=20))
    found = {stack.path: stack.aligned for stack in draft.hook_map.stacks or ()}
    assert {path: found[path] for path in ALIGNED[name]} == ALIGNED[name]
    assert draft.questions == ()


def test_lengths_that_could_be_anything_are_a_question() -> None:
    pipe = build("flux")
    draft = read_draft(pipe, find_hook_map(pipe, None, ()), "flux")
    for length in (6, 64, 32):  # short; as many text as image tokens; as many as channels
        short = complete(pipe, draft, lambda length=length: run("flux", pipe, steps=1, length=length))
        assert all(stack.aligned is None for stack in short.hook_map.stacks or ())
        assert len(short.questions) == 2 and "image_rotary_emb.0, image_rotary_emb.1" in short.questions[0]


def test_the_trial_stops_before_the_first_step() -> None:
    pipe = build("flux")
    steps: list[int] = []
    step = type(pipe.scheduler).step
    pipe.scheduler.step = lambda *a, **k: steps.append(1) or step(pipe.scheduler, *a, **k)
    seen = see(pipe, find_hook_map(pipe, None, ()), lambda: tiny.run("flux", pipe, steps=3))
    assert steps == [] and seen.calls == 2, "two branches, and no step"
