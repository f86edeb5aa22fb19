"""Every strategy on every tiny pipeline: exact at full budget, lossy and repeatable otherwise, and gone afterwards."""

from __future__ import annotations

import itertools
import warnings
from dataclasses import replace
from typing import Any

import diffusers
import pytest
import torch
from caches import ACTS, EXACT, STEPS, Log, allowed, fitting, one_each, ready
from probes import reachable_tensors
from tiny import ALL, TINY, build, call_arguments, noise, run
from variants import wan_two_experts

from chitu_diffusion import PAB, FBCache, Static, TaylorSeer, patch
from chitu_hooks import ChituWarning

pytestmark = pytest.mark.filterwarnings("ignore::chitu_hooks.ChituWarning")
FURTHER = [pytest.param(name, marks=pytest.mark.slow) for name in ALL if name not in TINY]


def settings(table: dict[str, Any], name: str) -> dict[str, Any]:
    """Every entry of `table` on the usual pipelines, and one for each strategy on the others."""
    return allowed(table if name in TINY else one_each(table), name)


def blocks(pipe: Any) -> int:
    with patch(pipe) as handle:
        return sum(len(stack.blocks) for stack in handle.sites.stacks if not stack.refiner)


@pytest.mark.parametrize("name", [*TINY, *FURTHER])
def test_full_budget_changes_nothing(name: str) -> None:
    pipe = build(name)
    stock = run(name, pipe, STEPS)
    for label, params in settings(EXACT, name).items():
        with patch(pipe, cache=ready(pipe, params)) as handle:
            assert torch.equal(run(name, pipe, STEPS), stock), label
        assert handle.report().features[0]["hits"] == 0
        assert handle.report().features[0]["computed"] == STEPS * ALL[name].branches


@pytest.mark.parametrize("name", [*TINY, *FURTHER])
def test_every_strategy_acts_repeats_itself_and_leaves_nothing(name: str) -> None:
    pipe = build(name)
    stock, count = run(name, pipe, STEPS), blocks(pipe)
    for label, params in settings(ACTS, name).items():
        with patch(pipe, cache=ready(pipe, fitting(name, params, count))) as handle:
            first = run(name, pipe, STEPS)
            feature = handle.report().features[0]
            assert feature["hits"] > 0, label
            assert not torch.equal(first, stock), label
            assert feature["bytes_held"] > 0 and feature["seconds"] > 0
            assert reachable_tensors(handle) == [], label
            run(name, pipe, 6, seed=3, prompt=1)
            assert torch.equal(run(name, pipe, STEPS), first), label
    assert torch.equal(run(name, pipe, STEPS), stock), "what a strategy had left behind would still be there"


@pytest.mark.parametrize("label", ACTS)
def test_each_branch_has_its_own_state(label: str) -> None:
    """Guidance on, off and on again, in one handle: each run equals that of a fresh handle."""
    pipe = build("wan")
    params = ready(pipe, fitting("wan", ACTS[label], 3))
    alone = {}
    for guided in (True, False):
        with patch(pipe, cache=params):
            alone[guided] = run("wan", pipe, STEPS, guided=guided)
    with patch(pipe, cache=params) as handle:
        for guided in (True, False, True):
            assert torch.equal(run("wan", pipe, STEPS, guided=guided), alone[guided])
            calls = handle.report().branches
            assert len(calls) == 1 + guided
            assert all(c["computed"] >= 1 for c in calls.values())
            assert handle.report().features[0]["hits"] >= len(calls)
            if label not in ("pab", "cubic"):  # their calls count as computed: only a part is reused
                assert all(c["skipped"] + c["replaced"] >= 1 for c in calls.values())


@pytest.mark.parametrize("label", ACTS)
def test_limits_count_real_steps(label: str) -> None:
    """Image to image at strength 0.7 runs 7 of 10 steps: warmup and cooldown are of those 7."""
    pipe, log = build("flux", cls=diffusers.FluxImg2ImgPipeline), Log()
    over = {"image": torch.rand(1, 3, 16, 16, generator=noise(3)), "strength": 0.7, "guided": False}
    params = replace(ACTS[label], warmup=2, cooldown=2, max_consecutive=2)
    if label.startswith("magcache"):
        params = replace(params, retention=0.0)
    with patch(pipe, cache=ready(pipe, params), features=(log,)):
        run("flux", pipe, 10, **over)
    computed = log.computed()
    assert log.hits > 0 or label == "static published", "stretched to 7 steps, that one computes them all"
    assert {0, 1, 5, 6} <= set(computed) and max(p for _, p, *_ in log.calls) == 6
    assert all(later - earlier <= 3 for earlier, later in itertools.pairwise(computed))


@pytest.mark.parametrize("label", [label for label in ACTS if label != "planned guarded"])  # which refuses
def test_both_stages_of_an_order_2_step_agree(label: str) -> None:
    pipe, log = build("wan", scheduler=diffusers.FlowMatchHeunDiscreteScheduler()), Log()
    with patch(pipe, cache=ready(pipe, fitting("wan", ACTS[label], 3)), features=(log,)):
        first = run("wan", pipe, STEPS)
        seen, log.calls = list(log.calls), []
        assert torch.equal(run("wan", pipe, STEPS), first)
    assert log.calls == seen and log.hits > 0
    decisions: dict[tuple[str, int], set[bool]] = {}
    for branch, position, _, skipped in seen:
        decisions.setdefault((branch, position), set()).add(skipped)
    assert all(len(decision) == 1 for decision in decisions.values())


@pytest.mark.parametrize("label", ACTS)
def test_an_exception_in_a_callback_leaves_no_trace(label: str) -> None:
    pipe = build("flux")
    params = ready(pipe, ACTS[label])

    def fail(pipe: Any, step: int, *_: Any) -> dict[str, Any]:
        if step == 5:
            raise KeyError("stop")
        return {}

    with patch(pipe, cache=params) as handle:
        first = run("flux", pipe, STEPS)
        with pytest.raises(KeyError):
            run("flux", pipe, STEPS, callback_on_step_end=fail)
        assert reachable_tensors(handle) == []
        run("flux", pipe, STEPS, height=32, width=32)
        assert torch.equal(run("flux", pipe, STEPS), first)


@pytest.mark.parametrize("label", ACTS)
def test_two_experts(label: str) -> None:
    variant = wan_two_experts()
    stock, log = variant.call(), Log()
    params = ready(variant.pipe, fitting("wan", ACTS[label], 3))
    with patch(variant.pipe, cache=params, features=(log,)) as handle:
        result = variant.call()
        assert torch.equal(variant.call(), result)
        calls = handle.report().branches
    assert {name.split("/")[0] for name in calls} == {"transformer", "transformer_2"}
    if label != "meancache":  # it holds the velocity that the scheduler gets, whichever expert it came from
        assert all(c["computed"] >= 1 for c in calls.values()), "each expert computes before it skips"
    assert log.hits
    assert not torch.equal(result, stock)


@pytest.mark.parametrize(
    ("name", "label"), [("flux", label) for label in ACTS] + [(n, s) for n in ("sd3", "zimage") for s in one_each(ACTS)]
)
def test_batches(name: str, label: str) -> None:
    """Decisions are taken for the whole batch, by the sample that changes most; what is fixed before equals the samples alone."""
    kwargs = call_arguments(name, STEPS, batch=2)
    pipe = build(name)
    params = ready(pipe, fitting(name, ACTS[label], 3))
    with patch(pipe, cache=params) as handle:
        both = next(iter(pipe(**kwargs).values()))
        assert handle.report().features[0]["batch_coupled"] == (
            label.split()[0] in ("fbcache", "easycache", "teacache", "cubic") or label == "planned guarded"
        )
        assert handle.report().features[0]["hits"] > 0
    assert not torch.equal(both[0], both[1])


def test_a_batch_is_computed_where_a_sample_needs_it() -> None:
    """One sample is drawn from far larger noise: it drifts otherwise, and the batch follows the worse of the two."""
    computed = {}
    shape = run("flux", build("flux"), 1, batch=2).shape
    latents = torch.randn(shape, generator=noise(5)) * torch.tensor([1.0, 8.0])[:, None, None]
    for index in (None, 0, 1):
        rows = slice(None) if index is None else slice(index, index + 1)
        kwargs = call_arguments("flux", 20, batch=2, guided=False)
        kwargs = {k: v[rows] if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
        pipe, log = build("flux"), Log()
        with patch(pipe, cache=FBCache(threshold=0.3), features=(log,)):
            pipe(**{**kwargs, "latents": latents[rows].clone()})
        assert log.hits
        computed[index] = len(log.computed())
    assert computed[None] >= max(computed[0], computed[1])
    assert computed[0] != computed[1]


def test_few_steps_and_noisy_schedulers_warn() -> None:
    pipe = build("flux")
    with patch(pipe, cache=ACTS["static"]), pytest.warns(ChituWarning, match="static: 4 steps are few"):
        run("flux", pipe, 4)
    pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(stochastic_sampling=True)
    with patch(pipe, cache=ACTS["static"]), pytest.warns(ChituWarning, match="EulerDiscreteScheduler adds fresh noise"):
        run("flux", pipe, STEPS)
    with patch(build("flux"), cache=ACTS["static"]) as handle, warnings.catch_warnings():
        warnings.simplefilter("error", ChituWarning)
        run("flux", handle.pipe, STEPS)


def test_a_schedule_whose_skips_are_all_forbidden_warns() -> None:
    pipe = build("flux")
    with (
        patch(pipe, cache=Static(steps=(0,), warmup=50)),
        pytest.warns(ChituWarning, match="static: nothing was skipped"),
    ):
        run("flux", pipe, STEPS)
    with patch(pipe, cache=Static(steps=range(STEPS))), warnings.catch_warnings():
        warnings.simplefilter("error")
        run("flux", pipe, STEPS)


def test_consecutive_reuse_of_attention_is_limited_too() -> None:
    pipe, found = build("flux"), {}
    for limit in (None, 1):
        with patch(pipe, cache=PAB(begin=0.0, end=1.0, interval=5, max_consecutive=limit), features=(log := Log(),)):
            run("flux", pipe, STEPS)
        found[limit] = log.computed()
    assert found[None] == [0, 5] and found[1] == [0, 2, 4, 5, 7, 9]


def test_a_model_that_writes_into_its_trunks_output_spoils_no_forecast() -> None:
    pipe, params = build("flux"), TaylorSeer(order=0, interval=3, of="feature")

    def write(module: Any, args: Any) -> None:
        args[0].mul_(1.0).add_(1.0)

    with patch(pipe, cache=params):
        hook = pipe.transformer.norm_out.register_forward_pre_hook(write)
        moved = run("flux", pipe, STEPS)
        hook.remove()
        hook = pipe.transformer.norm_out.register_forward_pre_hook(lambda module, args: (args[0] + 1.0, *args[1:]))
        assert torch.equal(run("flux", pipe, STEPS), moved)
        hook.remove()


def test_a_cache_that_never_hits_warns() -> None:
    with patch(build("flux"), cache=FBCache(threshold=1e-6)) as handle:
        with pytest.warns(
            ChituWarning, match=r"fbcache: nothing was skipped in 20 calls with FBCache\(.*threshold=1e-06"
        ):
            run("flux", handle.pipe, STEPS)


@pytest.mark.parametrize("value", [0.0, float("nan")])
@pytest.mark.parametrize("label", ["fbcache", "easycache", "teacache"])
def test_distances_of_zero_or_nan_compute_and_are_told(label: str, value: float) -> None:
    """As from a front block that adds nothing, or an overflow: nobody knows what the rest would do."""
    pipe, log = build("flux"), Log()
    stock = run("flux", pipe, STEPS)
    with patch(pipe, cache=ACTS[label], features=(log,)) as handle:
        (strategy,) = (feature for feature in handle.features if feature.name == label)
        strategy.reduce = lambda sums: sums * value  # type: ignore[attr-defined]
        assert torch.equal(run("flux", pipe, STEPS), stock)
        what = "zero" if value == 0.0 else "not finite"
        assert (
            any(f"was computed where its distance was {what}" in note for note in handle.report().notes) or value == 0
        )
    assert log.hits == 0


# cubic sorts tokens on the host, once a branch, and is refused where they are spread over ranks.
@pytest.mark.parametrize("label", [label for label in ACTS if label != "cubic"])
def test_a_decision_waits_for_the_device_once_and_through_reduce(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`reduce` is where ranks come to the same answer, so nothing else may be read; what is fixed before reads nothing."""
    pipe, reads, reduced = build("flux"), [], []
    for name in ("tolist", "item", "cpu", "__bool__", "__float__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, _noting(reads, name, getattr(torch.Tensor, name)))
    run("flux", pipe, STEPS)
    stock = len(reads)
    with patch(pipe, cache=ready(pipe, ACTS[label])) as handle:
        strategy: Any = handle.features[0]
        strategy.reduce = lambda sums: reduced.append(sums) or sums
        reads.clear()
        run("flux", pipe, STEPS)
        hits = handle.report().features[0]["hits"]
    assert hits > 0
    assert bool(reduced) == strategy.adaptive and all(sums.shape == (2, 1) for sums in reduced)
    assert len(reduced) >= hits or not strategy.adaptive or label == "planned guarded", (
        "the guard looks at computed steps"
    )
    # The plan is made for the scheduler's sigmas, which are read once, and how far off it was is read when all is over.
    assert len(reads) <= stock + len(reduced) + (2 if label.startswith("planned") else 0)


def _noting(reads: list[str], name: str, original: Any) -> Any:
    def function(*args: Any, **kwargs: Any) -> Any:
        if args[0].dtype != torch.int64:  # numbers of layers are kept on the host
            reads.append(name)
        return original(*args, **kwargs)

    return function
