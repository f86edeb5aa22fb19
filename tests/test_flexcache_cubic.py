"""`cubic` against a reference that gathers nothing: all tokens are computed, and frozen ones then get what they had before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from caches import ACTS, REFUSED, STEPS, Log
from probes import difference
from ranks import on_ranks
from tiny import ALL, build, run
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from variants import chroma_in_place, flux_controlnet, flux_ip_adapter, sd3_controlnet

from chitu_diffusion import Cubic, Parallel, patch
from chitu_diffusion.flexcache.frozen import mask_of_fewer
from chitu_diffusion.flexcache.regions import places_above
from chitu_hooks import RefusedError

pytestmark = pytest.mark.filterwarnings("ignore::chitu_hooks.ChituWarning")
PARAMS = Cubic(
    warmup=2, static=0.3, medium=0.6, static_interval=6, medium_interval=3, active_interval=1, region=3, cooldown=0
)
SIZES: dict[str, dict[str, Any]] = {"flux": {}, "sd3": {}, "wan": {"height": 64, "width": 64}}
TEXT_FIRST = {"flux": True, "sd3": False, "wan": False}
FIRST = {"flux": "transformer_blocks", "sd3": "transformer_blocks", "wan": "blocks"}


def normalised(x: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()


def scores(seen: list[torch.Tensor], region: int) -> list[float]:
    """The score of each token, region by region and pair by pair; `seen` are (B, S, C) of the steps before."""
    tokens, later, result = seen[0].shape[1], len(seen) // 2, []
    changes = []
    for start in range(0, tokens, region):
        first = min(start, tokens - region)
        pairs = [(i, j) for i in range(first, first + region) for j in range(first, first + region)]
        d = [[(x[:, i] - x[:, j]).norm(dim=-1) for i, j in pairs] for x in map(normalised, seen)]
        steps = range(len(seen) - later)
        moved = [abs(d[t + later][p] - d[t][p]) for t in steps for p in range(len(pairs))]
        changes.append(torch.stack(moved).mean(0))
    change = torch.stack(changes, 1)
    low, high = change.min(1, keepdim=True)[0], change.max(1, keepdim=True)[0]
    for score in ((change - low) / (high - low)).max(0)[0].tolist():
        result += [score] * region
    return result[:tokens]


class Reference:
    """Hooks on a stock pipeline with which every token is computed, and frozen ones are then given what they had before."""

    def __init__(self, name: str, params: Cubic) -> None:
        self.name, self.params, self.memories = name, params, {}
        self.call, self.layer, self.frozen, self.counts = -1, 0, [], []
        self.sdpa = torch.nn.functional.scaled_dot_product_attention

    def begins(self, block: Any, args: Any, kwargs: Any) -> None:
        self.call, self.layer = self.call + 1, 0
        position, branch = divmod(self.call, ALL[self.name].branches)
        m = self.m = self.memories.setdefault(branch, {"seen": [], "keys": {}})
        self.entry = (kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]).clone()
        self.frozen = self.frozen_at(position, m)
        self.counts.append(self.entry.shape[1] - len(self.frozen))
        if not self.frozen:
            m["full"] = m["medium"] = m["active"] = position

    def frozen_at(self, position: int, m: dict[str, Any]) -> list[int]:
        p = self.params
        if position < p.warmup or position >= STEPS - p.cooldown:
            return []
        first = self.memories[0]
        if "scores" not in first:
            first["scores"] = scores(first["seen"], p.region)
        if position - m["full"] >= p.static_interval:
            return []
        if position - m["active"] < p.active_interval:
            return list(range(self.entry.shape[1]))
        limit, m["active"] = p.medium, position
        if position - m["medium"] >= p.medium_interval:
            m["medium"], limit = position, p.static
        return [i for i, score in enumerate(first["scores"]) if score < limit]

    def attention(self, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        tokens = self.entry.shape[1]
        if query.shape[2] == key.shape[2] >= tokens:
            offset = key.shape[2] - tokens if TEXT_FIRST[self.name] else 0
            places = [offset + i for i in self.frozen]
            key, value = key.clone(), value.clone()
            if places:
                old_key, old_value = self.m["keys"][self.layer]
                key[:, :, places], value[:, :, places] = old_key[:, :, places], old_value[:, :, places]
            self.m["keys"][self.layer] = key, value
            self.layer += 1
        return self.sdpa(query, key, value, *args, **kwargs)

    def ends(self, norm: Any, args: Any) -> Any:
        x, m, position = args[0].clone(), self.m, self.call // ALL[self.name].branches
        values = m.setdefault(
            "values", [[] for _ in range(x.shape[1])]
        )  # of each token, the last two times it was computed
        for i, known in enumerate(values):
            if i not in self.frozen:
                values[i] = [*known[-1:], (position, x[:, i] - self.entry[:, i])]
                continue
            (before, old), (at, new) = known
            x[:, i] = self.entry[:, i] + new + 0.5 * (position - at) * (new - old) / (at - before)
        if not self.frozen:
            m["seen"].append(x.clone())
        return (x, *args[1:])

    def run(self, **over: Any) -> torch.Tensor:
        transformer = (pipe := build(self.name)).transformer
        getattr(transformer, FIRST[self.name])[0].register_forward_pre_hook(self.begins, with_kwargs=True)
        transformer.norm_out.register_forward_pre_hook(self.ends)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(torch.nn.functional, "scaled_dot_product_attention", self.attention)
            return run(self.name, pipe, STEPS, **over)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("active_interval", [1, 2])
@pytest.mark.parametrize("name", SIZES)
def test_cubic(name: str, active_interval: int, batch: int) -> None:
    params = replace(PARAMS, active_interval=active_interval)
    reference = Reference(name, params)
    expected = reference.run(batch=batch, **SIZES[name])
    branches = ALL[name].branches
    for branch in range(branches):
        assert reference.counts[branch::branches] == reference.counts[::branches], "branches agree"
    held = [count for count in reference.counts if not count]
    assert len(set(reference.counts) - {0}) == 3, "all tokens, those that are not static, and the active ones"
    assert bool(held) == (active_interval > 1), "and none"
    pipe, log = build(name), Log()
    stock = run(name, pipe, STEPS, batch=batch, **SIZES[name])
    seen: list[int] = []
    pipe.transformer.get_submodule(FIRST[name])[1].register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(
            (kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]).shape[1]
        ),
        with_kwargs=True,
    )
    with patch(pipe, cache=params, features=(log,)) as handle:
        result = run(name, pipe, STEPS, batch=batch, **SIZES[name])
        report = handle.report().features[-1]
    assert seen == [count for count in reference.counts if count], (
        "blocks are handed the active tokens only, or not called"
    )
    assert log.hits == report["hits"] == sum(count < max(seen) for count in reference.counts) > 0
    assert report["batch_coupled"] and report["bytes_held"] > 0
    assert difference(result, expected) < 1e-5
    assert difference(result, stock) > 1e-3


@pytest.mark.parametrize("name", ["flux", "sd3", "wan", "zimage", "qwen"])
def test_flops_are_those_that_were_done(name: str) -> None:
    """The books say what torch's counter counts in the run itself."""
    pipe = build(name)
    with patch(pipe, cache=ACTS["cubic"]) as handle, sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as counter:
            run(name, pipe, STEPS)
        flops = handle.report().features[0]["flops"]
    assert 0 < flops["saved"] == flops["full"] - flops["spent"]
    assert flops["spent"] == sum(counter.get_flop_counts()[type(pipe.transformer).__name__].values())


@pytest.mark.parametrize("make", [flux_controlnet, sd3_controlnet, chroma_in_place, flux_ip_adapter])
def test_what_is_added_between_blocks_is_cut_too(make: Any) -> None:
    variant = make()
    stock = variant.call()
    with patch(variant.pipe, cache=ACTS["cubic"]) as handle:
        result = variant.call()
        books = handle.report().features[0]
        assert books["hits"] > 0
        if make is not flux_ip_adapter:  # whose layers are not in the config that FLOPs are counted by
            assert 0 < books["flops"]["saved"] < books["flops"]["full"]
    assert result.isfinite().all() and difference(result, stock) > 0


def guidance_ends(pipe: Any, step: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The callback of diffusers' documentation that saves the unconditional half from a step on: a new branch midway."""
    if step == 4:
        pipe._guidance_scale = 0.0
        kwargs.update({name: value.chunk(2)[-1] for name, value in kwargs.items() if "embeds" in name})
    return kwargs


def grows(at: int) -> Any:
    def callback(pipe: Any, step: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        if step == at:
            kwargs["latents"] = torch.nn.functional.interpolate(kwargs["latents"], scale_factor=2)
        return kwargs

    return callback


@pytest.mark.parametrize(
    ("callback", "tokens"),
    [(guidance_ends, 256), (grows(0), 1024), (grows(4), 1024)],
    ids=["guidance ends", "grows at first", "grows"],
)
def test_what_changes_midway_is_computed_and_then_frozen_anew(callback: Any, tokens: int) -> None:
    pipe, counts = build("sd3"), []
    pipe.transformer.transformer_blocks[0].register_forward_pre_hook(
        lambda _, args, kwargs: counts.append(kwargs["hidden_states"].shape[:2]), with_kwargs=True
    )
    inputs = ["latents", "prompt_embeds", "pooled_prompt_embeds"]
    with patch(pipe, cache=PARAMS):
        result = run("sd3", pipe, STEPS, callback_on_step_end=callback, callback_on_step_end_tensor_inputs=inputs)
    new = [shape for shape in counts if shape[0] == counts[-1][0]] if callback is guidance_ends else counts
    whole = [place for place, shape in enumerate(new) if shape[1] == tokens]
    assert whole and result.isfinite().all()
    assert any(0 < shape[1] < tokens for shape in new[whole[0] :]), (
        "tokens are left out of what is there after the change"
    )


def test_masks() -> None:
    """A mask of all queries loses rows; one of the fresh keys gets columns that hide nothing."""
    mask, places = torch.rand(1, 1, 6, 6) > 0.5, torch.tensor([0, 1, 4])
    assert torch.equal(mask_of_fewer(mask, places, 6), mask[:, :, [0, 1, 4]])
    assert torch.equal(mask_of_fewer(mask[:, :, :1], places, 6), mask[:, :, :1])
    fresh = torch.tensor([[[[False, True, True]]]])
    assert mask_of_fewer(fresh, places, 6).flatten().tolist() == [False, True, True, True, True, True]
    added = torch.tensor([[[[-9.0, 0.0, 0.0]]]])
    assert mask_of_fewer(added, places, 6).flatten().tolist() == [-9.0, 0, 0, 0, 0, 0]


def test_the_last_region_reaches_back() -> None:
    places = places_above(torch.tensor([0.1, 0.9, 0.5]), 0.5, 3, 8)
    assert places is not None and places.tolist() == [3, 4, 5, 6, 7]
    assert places_above(torch.tensor([0.1, 0.9]), 0.1, 3, 5) is None


@pytest.mark.parametrize("name", REFUSED["cubic"])
def test_refused_by_name(name: str) -> None:
    with pytest.raises(
        RefusedError, match=r"cubic: the hook map '\w+' \(registry\) does not say which arguments of transformer"
    ):
        patch(build(name), cache=Cubic())


def with_ranks(rank: int) -> list[str]:
    told = []
    for parallel in (Parallel(ulysses=2), Parallel(cfg=2)):
        try:
            patch(build("sd3"), cache=Cubic(), parallel=parallel).undo()
            told.append("not refused")
        except RefusedError as error:
            told.append(str(error))
    return told


@pytest.mark.multiprocess
def test_refused_over_ranks() -> None:
    for context, guidance in on_ranks(with_ranks, 2):
        assert context.startswith("cubic: context parallelism spreads the tokens over ranks")
        assert guidance.startswith("cubic: under cfg parallelism each rank would leave out tokens by its own part")
