"""The ranks of one picture draw the same noise and are asked for the same; ranks of other pictures are left alone."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusers import FlowMatchEulerDiscreteScheduler
from ranks import on_ranks
from tiny import build, call_arguments, noise, run

from chitu_diffusion import FBCache, Parallel, patch
from chitu_diffusion.adapters import registry
from chitu_diffusion.attention import choice
from chitu_diffusion.attention.fastest import Row
from chitu_diffusion.flexcache import make_strategy
from chitu_diffusion.parallel.choose import auto_parallel
from chitu_diffusion.parallel.environment import in_turn
from chitu_hooks import GenerationError, PatchError, RefusedError

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


def _latents(pipe: Any, **over: Any) -> torch.Tensor:
    return pipe(**{**call_arguments("flux", 3), **over})[0]


def _stochastic() -> Any:
    pipe = build("flux")
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(stochastic_sampling=True)
    return pipe


def _global(rank: int) -> dict[str, Any]:
    torch.manual_seed(rank)
    return {"generator": None}


def _own(rank: int) -> dict[str, Any]:
    return {"generator": noise(rank)}


def _listed(rank: int) -> dict[str, Any]:
    embeds = {name: torch.cat([value] * 2) for name, value in call_arguments("flux").items() if name.endswith("embeds")}
    return {"generator": [noise(rank), noise(rank + 10)], **embeds}


def _drawn(rank: int) -> dict[str, Any]:
    torch.manual_seed(rank)
    return {"generator": noise(rank)}


NOISE: dict[str, tuple[Callable[[], Any], Callable[[int], dict[str, Any]]]] = {
    "no generator": (lambda: build("flux"), _global),
    "a generator a rank": (lambda: build("flux"), _own),
    "a list of generators": (lambda: build("flux"), _listed),
    "a stochastic scheduler": (_stochastic, _drawn),
}


def two(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (make, arguments) in NOISE.items():
        pipe = make()
        expected = _latents(pipe, **arguments(0))
        alone = _latents(pipe, **arguments(rank))
        with patch(pipe, parallel=Parallel(gather=2)):
            got = _latents(pipe, **arguments(rank))
        found[name] = float((got - expected).abs().max()), float((alone - expected).abs().max())
    found["other request"] = other_request(rank)
    found["misfit"] = [refusal(Parallel(ulysses=3)), refusal("usp")]
    found["vae"] = vae_tiles()
    found["used again"] = used_again()
    found["calibrate"] = calibrated()
    found["turns"] = turns(rank)
    found["kernels"] = kernels()
    found["tables"] = tables(rank)
    found["raises"] = raises_on_one_rank(rank)
    return found


def other_request(rank: int) -> Any:
    pipe = build("flux")
    expected = run("flux", pipe, 3)
    with patch(pipe, parallel=Parallel(gather=2)):
        try:
            run("flux", pipe, 3 + rank, prompt=rank)
            message = ""
        except GenerationError as error:
            message = str(error)
        return message, float((run("flux", pipe, 3) - expected).abs().max())


def refusal(parallel: Any) -> str:
    try:
        patch(build("flux"), parallel=parallel).undo()
    except PatchError as error:
        return str(error)
    return ""


def vae_tiles() -> Any:
    """A VAE in tiles of 8 latents a side, on two ranks; the branches of guidance on different ranks change no bit."""
    pipe = build("flux")
    pipe.vae.enable_tiling()
    scale = pipe.vae.tile_sample_min_size // pipe.vae.tile_latent_min_size
    pipe.vae.tile_sample_min_size, pipe.vae.tile_latent_min_size = 8 * scale, 8
    arguments = {**call_arguments("flux", 3), "output_type": "pt"}
    before = dict(vars(pipe.vae)), dict(vars(pipe.vae.decoder))

    def drawn() -> torch.Tensor:
        return pipe(**{**arguments, "generator": noise(0)})[0]

    expected = drawn()
    with patch(pipe, parallel=Parallel(cfg=2)) as handle:
        got = drawn()
        told = next(f for f in handle.report().features if f["name"] == "vae tiles")
    pipe.vae.disable_tiling()
    untouched = before == (dict(vars(pipe.vae), use_tiling=True), dict(vars(pipe.vae.decoder)))
    return torch.equal(got, expected), not torch.equal(drawn(), expected), told, untouched


def kernels() -> Any:
    """A named kernel on what each rank has, and one that cannot be put together from parts."""
    pipe = build("flux")
    expected = run("flux", pipe, 3)
    far = []
    for mode in ("ulysses", "gather", "ring"):
        with patch(pipe, attention="sdpa_flash", parallel=Parallel(**{mode: 2})):
            far.append(float((run("flux", pipe, 3) - expected).abs().max()))
    try:
        patch(pipe, attention="sdpa_math", parallel=Parallel(ring=2)).undo()
        message = ""
    except RefusedError as error:
        message = str(error)
    return far, message


def tables(rank: int) -> tuple[list[str], str]:
    """`attention="auto"` on ranks with different tables, of which the second also lacks a kernel of the first's."""

    def row(*names: str) -> Row:
        return Row("9.0", "float32", 16, 1, names)

    with pytest.MonkeyPatch.context() as patched:
        rows = (row("diffusers:_native_math", "sdpa_flash", "sdpa_math"),) if rank == 0 else (row("sdpa_math"),)
        known = choice.kernels()
        if rank == 1:
            known = {name: kernel for name, kernel in known.items() if name != "diffusers:_native_math"}
        patched.setattr(choice, "fastest", lambda: rows)
        patched.setattr(choice, "kernels", lambda: known)
        patched.setattr(choice.AutoAttention, "device", "cpu")
        with patch(build("flux"), attention="auto", parallel=Parallel(gather=2)) as handle:
            run("flux", handle.pipe, 3)
            told = next(f for f in handle.report().features if f["name"] == "attention=auto")
    return list(told["chosen"].values()), told["measured, and not usable here"]["diffusers:_native_math"]


def used_again() -> Any:
    """What a strategy and a choice of kernels of the caller's do when the handle is undone."""
    strategy, kernels, sums = make_strategy(FBCache(threshold=1.0)), choice.AutoAttention(), torch.ones(2, 1)
    found = []
    with patch(build("flux"), features=(strategy, kernels), parallel=Parallel(gather=2)):
        found.append((float(strategy.reduce(sums.clone()).sum()), len(kernels.told("here"))))
    found.append((float(strategy.reduce(sums.clone()).sum()), len(kernels.told("here"))))
    with patch(build("flux"), features=(strategy,)) as handle:
        run("flux", handle.pipe, 4)
        found.append((float(strategy.reduce(sums.clone()).sum()), handle.report().features[0]["hits"]))
    return found


def calibrated() -> str:
    """Constants are not measured where a rank sees a part of the calls, or of their tokens."""
    messages = set()
    for mode in ("cfg", "gather"):
        with patch(build("flux"), parallel=Parallel(**{mode: 2})) as handle:
            try:
                handle.calibrate([call_arguments("flux", 3)])  # type: ignore[attr-defined]
            except PatchError as error:
                messages.add(str(error))
    return " ".join(messages)


def turns(rank: int) -> tuple[float, float]:
    """When this rank's turn began and ended."""
    with in_turn(rank):
        began = time.monotonic()
        time.sleep(0.2)
        return began, time.monotonic()


def raises_on_one_rank(rank: int) -> Any:
    """As in a server: one rank's callback raises, is caught, and the process goes on."""
    pipe = build("flux")

    def callback(*_: Any) -> dict[str, Any]:
        if rank == 1:
            raise ValueError("only here")
        return {}

    started = time.monotonic()
    with patch(pipe, parallel=Parallel(gather=2)):
        try:
            run("flux", pipe, 3, callback_on_step_end=callback)
            raised = None
        except Exception as error:
            raised = type(error).__name__
    return raised, time.monotonic() - started


@pytest.fixture(scope="module")
def pair() -> list[dict[str, Any]]:
    return on_ranks(two, 2, timeout=8)


@pytest.mark.parametrize("name", NOISE)
def test_the_first_rank_draws_for_all(pair: list[dict[str, Any]], name: str) -> None:
    assert pair[1][name][1] > 0.1, "this rank's own noise is another"
    for rank in pair:
        assert rank[name][0] < 1e-5


def test_different_requests_are_refused_on_every_rank_and_the_next_works(pair: list[dict[str, Any]]) -> None:
    for rank in pair:
        message, difference = rank["other request"]
        assert (
            "were called with different" in message and "num_inference_steps" in message and "prompt_embeds" in message
        )
        assert difference < 1e-5


def test_degrees_that_do_not_fit_name_those_that_do(pair: list[dict[str, Any]]) -> None:
    for rank in pair:
        degrees, word = rank["misfit"]
        assert degrees == "parallel: ulysses 3 takes 3 ranks, and the process group has 2; products that fit: 1, 2"
        assert word == "parallel='usp' is to be 'auto' or a Parallel, such as Parallel(cfg=2, ulysses=2)"


def test_tiles_of_the_vae_are_divided_and_give_the_bits_of_the_tiled_decode(pair: list[dict[str, Any]]) -> None:
    shares = []
    for rank in pair:
        equal, tiling_shows, told, untouched = rank["vae"]
        assert equal and tiling_shows and untouched
        shares.append(told["tiles decoded here"])
        assert told["of"] == sum(shares) or rank is pair[0]
    assert min(shares) > 0


def test_a_feature_used_again_asks_no_other_rank(pair: list[dict[str, Any]]) -> None:
    for rank in pair:
        together, alone, again = rank["used again"]
        assert together == (4.0, 2) and alone == (2.0, 1)
        assert again[0] == 2.0 and again[1] > 0


def test_constants_are_measured_on_one_rank(pair: list[dict[str, Any]]) -> None:
    for rank in pair:
        assert rank["calibrate"] == (
            "calibrate measures whole calls on one rank, and parallel spreads them over 2; patch without parallel for it"
        )


def test_ranks_of_a_machine_take_turns(pair: list[dict[str, Any]]) -> None:
    assert pair[0]["turns"][1] <= pair[1]["turns"][0], "the clock is the machine's"


def test_kernels_run_on_every_rank(pair: list[dict[str, Any]]) -> None:
    for rank in pair:
        far, message = rank["kernels"]
        assert max(far) < 1e-5
        assert "sdpa_math gives no log-sum-exp" in message and "use one of sdpa_flash" in message


def test_the_first_ranks_table_and_the_kernels_of_all_decide_what_auto_runs(pair: list[dict[str, Any]]) -> None:
    for rank in pair:
        assert rank["tables"] == (["sdpa_flash"], "cannot be used on every rank" if rank is pair[0] else "is not known")


def test_a_rank_that_stops_alone_does_not_hang_the_other(pair: list[dict[str, Any]]) -> None:
    assert pair[1]["raises"][0] == "ValueError"
    raised, seconds = pair[0]["raises"]
    assert raised is not None and seconds < 30


def four(rank: int) -> dict[str, Any]:
    """Two pairs that draw different pictures, a different number of times; and a mesh within a group."""
    pair = rank // 2
    pipe = build("flux")
    expected = [run("flux", pipe, 2, seed=pair + 10 * number) for number in range(1 + pair)]
    before = dist.get_world_size()
    with patch(pipe, parallel=Parallel(ulysses=2)) as handle:
        got = [run("flux", pipe, 2, seed=pair + 10 * number) for number in range(1 + pair)]
        spread = handle.report().features[-1]["calls spread"]
    chosen = several_machines()
    group = dist.new_group([0, 2]), dist.new_group([1, 3])
    with patch(pipe, parallel=Parallel(gather=2, group=group[rank % 2])) as handle:
        across = run("flux", pipe, 2, seed=rank % 2)
        ranks = handle.report().features[0]["ranks"]
    return {
        "difference": max(float((a - b).abs().max()) for a, b in zip(got, expected)),
        "spread": spread,
        "ranks": ranks,
        "across": float((across - run("flux", pipe, 2, seed=rank % 2)).abs().max()),
        "world": dist.get_world_size() == before,
        "chosen": chosen,
    }


def several_machines() -> list[str]:
    """What `auto` chooses for a model of four heads without guidance, on one machine and on two."""
    pipe = build("sd3")
    hook_map = dataclasses.replace(next(found for found in registry() if found.name == "sd3"), guidance="embedded")
    chosen = []
    for here in ("4", "2"):
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("LOCAL_WORLD_SIZE", here)
            chosen.append(str(auto_parallel(pipe, hook_map)))
    return chosen


def test_pairs_are_independent_and_groups_of_others_stay() -> None:
    for rank, found in enumerate(on_ranks(four, 4, timeout=60)):
        assert found["spread"] > 0 and found["difference"] < 1e-5
        assert found["ranks"] == [rank % 2, rank % 2 + 2] and found["across"] < 1e-5
        assert found["world"]
        assert found["chosen"] == ["ulysses 4", "ulysses 2 × gather 2"], "Ulysses stays within a machine"


def test_without_a_process_group_the_way_to_start_is_told() -> None:
    with pytest.raises(PatchError, match="chitu run --nproc 2 or torchrun --nproc-per-node 2"):
        patch(build("flux"), parallel=Parallel(ulysses=2))
    with pytest.raises(PatchError, match="no process group is initialised"):
        patch(build("flux"), parallel="auto")
    with pytest.raises(PatchError, match="patch takes a loaded diffusers pipeline, not str"):
        patch("FLUX.1-dev", parallel=Parallel(cfg=2))
    pipe = build("flux")
    with patch(pipe), pytest.raises(PatchError, match="is patched already"):
        patch(pipe, parallel=Parallel(cfg=2))
    with pytest.raises(PatchError, match="ulysses=0 is to be a whole number"):
        Parallel(ulysses=0)
    with patch(build("flux"), parallel=Parallel()) as handle:
        assert handle.features == ()
