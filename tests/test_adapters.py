"""Every adapter against the models themselves: classes, stacks, roles, order, arguments with tokens, and guidance."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import diffusers as D
import pytest
import torch
from tiny import ALL, build, run
from tokens import token_arguments

from chitu_diffusion import Feature, patch
from chitu_diffusion.adapters import registry
from chitu_hooks import HookMap

LENGTHS = {"zimage": (20, 40)}
"""Token counts of a short and a long text where the model pads them, to 32 tokens."""
FIXED_TEXT = {"hunyuan_dit"}
"""Pipelines that take texts of one length only."""


@cache
def map_of(name: str) -> HookMap:
    with patch(build(name)) as handle:
        return handle.hook_map


@cache
def tokens_of(name: str) -> dict[str, dict[str, str]]:
    return token_arguments(name, *LENGTHS.get(name, (6, 9)))


@pytest.mark.parametrize("hook_map", registry(), ids=lambda hook_map: hook_map.name)
def test_pipeline_classes_exist_and_take_the_denoisers(hook_map: HookMap) -> None:
    """A class that takes no such component refuses the map when it is patched, so the claim would be empty."""
    for pipeline in hook_map.pipelines:
        cls = getattr(D, pipeline)
        if not issubclass(cls, D.ModularPipeline):
            assert set(hook_map.denoisers) <= inspect.signature(cls.__init__).parameters.keys(), pipeline
    twice = [p for other in registry() if other is not hook_map for p in other.pipelines if p in hook_map.pipelines]
    assert twice == []


def test_wan_from_a_clip() -> None:
    base = build("wan")
    pipe = D.WanVideoToVideoPipeline(
        **{name: part for name, part in base.components.items() if not name.startswith("transformer_")}
    )
    with patch(pipe, cache="fbcache") as handle:
        assert (handle.hook_map.name, handle.hook_map.source) == ("wan_v2v", "registry")
        assert [denoiser.name for denoiser in handle.sites.denoisers] == ["transformer"]


def test_every_tiny_pipeline_has_an_adapter() -> None:
    assert {name for name in ALL if map_of(name).source != "registry"} == set()


@pytest.mark.parametrize("name", sorted(ALL.keys() - FIXED_TEXT))
def test_roles_are_those_of_the_tokens(name: str) -> None:
    """A role is right if the stream grows with the picture, with the text, or with both."""
    for stack in map_of(name).stacks or ():
        found = {argument: role.partition("@")[0] for argument, role in tokens_of(name)[stack.path].items()}
        assert {argument: role for role, argument in stack.streams.items()}.items() <= found.items(), stack.path


@pytest.mark.parametrize("name", sorted(ALL.keys() - FIXED_TEXT))
def test_aligned_arguments_are_those_with_tokens(name: str) -> None:
    """All of them, but for masks, which go whole into blocks, and for text that is no stream but only looked at."""
    for stack in map_of(name).stacks or ():
        if stack.aligned is None:
            continue
        roles = {"image", "text", "joint"} if "joint" in stack.streams or len(stack.streams) > 1 else set(stack.streams)
        found = {
            argument: role
            for argument, role in tokens_of(name)[stack.path].items()
            if argument not in stack.streams.values() and role.partition("@")[0] in roles
        }
        assert {a: r for a, r in found.items() if "mask" not in a}.items() <= stack.aligned.items(), stack.path
        assert {a: r for a, r in stack.aligned.items() if a in found}.items() <= found.items(), stack.path


class FirstQueries(Feature):
    """Keeps the queries of the first joint attention of a stack, and the sample moved or not."""

    name = "first queries"

    def __init__(self) -> None:
        self.found: dict[str, tuple[torch.Tensor, tuple[str, ...]]] = {}

    def attention(self, q_BSHD: torch.Tensor, k_BTHD: torch.Tensor, v_BTHD: torch.Tensor, ctx: Any) -> None:
        stack = ctx.site.stack
        if stack is not None and not stack.refiner and not self.found:
            self.found[stack.path] = q_BSHD.clone(), stack.order


@pytest.mark.parametrize("name", [n for n in ALL if n not in {"wan", "pixart", "sana", "ltx", "hunyuan_dit"}])
def test_order_in_joint_attention(name: str) -> None:
    """Rows whose queries move with the noise are image: they are where the map says."""
    (one, order), (other, _) = (_first_queries(name, seed) for seed in (0, 1))
    moved = (one - other).abs().flatten(2).amax(2)[0] > 1e-6
    assert moved.any() and not moved.all()
    first = "image" if moved[0] else "text"
    assert order[0] == first
    assert int((moved[1:] != moved[:-1]).sum()) == 1, "two runs of tokens"


def _first_queries(name: str, seed: int) -> tuple[torch.Tensor, tuple[str, ...]]:
    queries = FirstQueries()
    with patch(build(name), features=(queries,)) as handle:
        run(name, handle.pipe, 2, seed=seed)
    return next(iter(queries.found.values()))


class Calls(Feature):
    """Counts denoiser calls, and the rows of each, at the first step."""

    name = "calls"

    def __init__(self) -> None:
        self.rows: list[int] = []

    def denoiser_in(self, call: Any) -> None:
        if call.step.index == 0:
            sample = call.argument(next(iter(call.denoiser.arguments)))
            self.rows.append(len(sample))


@pytest.mark.parametrize("name", ALL)
def test_guidance_is_run_as_the_map_says(name: str) -> None:
    calls = Calls()
    with patch(build(name), features=(calls,)) as handle:
        run(name, handle.pipe, 2)
    seen = "sequential" if len(calls.rows) > 1 else "batched" if calls.rows[0] > 1 else "embedded"
    if seen != "embedded":  # a distilled checkpoint of a family that may also be guided
        assert map_of(name).guidance == seen
