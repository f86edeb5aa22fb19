"""Case files: what they unfold to, and that whatever is wrong in one is told in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from chitu_diffusion.bench.cases import Case, default_cases, load_cases
from chitu_diffusion.bench.errors import BenchError
from chitu_diffusion.bench.files import prompts_file
from chitu_diffusion.bench.kinds import PEERS
from chitu_diffusion.flexcache.params import PARAMS


def load(folder: Path, text: str) -> list[Case]:
    file = folder / "cases.yaml"
    file.write_text(text, encoding="utf-8")
    return load_cases(file)


def test_an_entry_unfolds(tmp_path: Path) -> None:
    text = "steps: [4, 6]\ncases: [{use: static, family: fixed, params: {steps: uniform}, vary: {budget: [2, 3]}}]"
    found = load(tmp_path, text)
    assert [(case.steps, case.params["budget"]) for case in found] == [(4, 2), (4, 3), (6, 2), (6, 3)]
    assert {(case.kind, case.use, case.family) for case in found} == {("chitu", "static", "fixed")}
    assert found[0].label == "static steps=uniform, budget=2"


def test_the_shipped_file_has_every_strategy_every_peer_and_the_free_ones() -> None:
    cases = load_cases(default_cases())
    assert {case.use for case in cases if case.kind == "chitu"} == set(PARAMS)
    assert {case.kind for case in cases} == {"chitu", "fewer steps", "coarser grid", *PEERS}
    quick = [case for case in cases if case.quick]
    assert 5 <= len(quick) <= 8 and {case.steps for case in quick} == {28}


@pytest.mark.parametrize("path", sorted(default_cases().parent.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_file_can_be_run(path: Path) -> None:
    assert load_cases(path)


def test_the_shipped_prompts_are_divided_into_tuning_and_test(tmp_path: Path) -> None:
    whole, tuning, test = (
        Path(prompts_file(name)).read_text().splitlines() for name in ("flexcache", "tuning", "test")
    )
    assert whole == tuning + test and len(tuning) == 8 and len(set(whole)) == 32
    own = tmp_path / "test"
    own.touch()
    assert prompts_file(str(own)) == str(own) and prompts_file("mine.txt") == "mine.txt"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("cases: [{use: fbcach}]", "case 1: no cache 'fbcach'; nearest: fbcache"),
        ("cases: [{use: static, params: {steps: uniform, budgt: 3}}]", "no parameter 'budgt'; nearest: budget"),
        ("cases: [{use: fbcache}, {usee: static}]", "case 2: unknown key 'usee'; nearest: use"),
        ("cases: [{use: fbcache, params: {on: 1}}]", "YAML reads True as a bool; quote it"),
        ("case: []", "is to hold `cases`"),
        ("stepz: 3\ncases: [{use: fbcache}]", "unknown key 'stepz'; nearest: steps"),
        ("cases: [{kind: difusers, use: magcache}]", "no kind 'difusers'; nearest: diffusers"),
        ("cases: [{kind: diffusers, use: firstblock}]", "no cache 'firstblock'; nearest: first_block_cache"),
        ("cases: [{kind: diffusers, use: magcache, params: {treshold: 1}}]", "'treshold'; nearest: threshold"),
        ("cases: [{kind: fewer steps, params: {count: 99}}]", "from 1 to 28, the steps, not 99"),
        ("cases: [{kind: coarser grid, params: {count: 9, schedule: uniforn}}]", "nearest: uniform"),
        ("cases: [{kind: attention, use: sdpa_flsh}]", "nearest: sdpa_flash"),
        ("cases: [{kind: attention, use: auto, params: {a: 1}}]", "use names a kernel, and there are no params"),
        ("cases: [{use: fbcache, steps: 0}]", "steps are whole numbers from 1, not 0"),
        ("cases: [{use: fbcache}, {use: fbcache}]", "is there twice"),
        ("cases: [", "is no YAML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(BenchError) as error:
        load(tmp_path, text)
    assert told in str(error.value) and "\n" not in str(error.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="cannot be read: No such file"):
        load_cases(tmp_path / "none.yaml")
