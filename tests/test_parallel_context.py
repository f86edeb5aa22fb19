"""Tokens spread over ranks: one process's result on every family, at even and odd lengths, with text spread or whole."""

from __future__ import annotations

from typing import Any

import pytest
from parallel_cases import ODD, Case, Outcome, case, controls, outcomes, variant_outcomes
from ranks import on_ranks

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

TOLERANCE = 1e-5
FAMILIES = list(ODD)
JOINT = ("flux", "qwen", "sd3", "flux2_klein")

TWO = [
    *(case(name, ulysses=2) for name in FAMILIES),
    *(case(name, gather=2) for name in FAMILIES),
    *(case(name, {"length": 7, **ODD[name]}, ring=2) for name in FAMILIES),
    *(case(name, {"length": 7, **ODD[name]}, ulysses=2) for name in FAMILIES),
    *(case(name, {"length": 7, **ODD[name]}, gather=2) for name in FAMILIES),
    *(case(name, {"length": 7, "batch": 2, **ODD[name]}, ulysses=2, text="replicate") for name in JOINT),
    *(case(name, {"length": 7, "batch": 2, **ODD[name]}, gather=2, text="replicate") for name in JOINT),
]
FOUR = [
    *(case(name, {"length": 7, **ODD[name]}, gather=2, ulysses=2) for name in ("qwen", "sd3", "lumina2", "flux")),
    *(case(name, {"length": 7, **ODD[name]}, cfg=2, ulysses=2) for name in FAMILIES if name != "flux2"),
    *(case(name, {"length": 7, **ODD[name]}, ring=2, ulysses=2) for name in ("sd3", "pixart")),
    case("flux", {"length": 9, **ODD["flux"]}, ring=4),
    *(case(name, {"length": 5}, ulysses=4) for name in ("qwen", "sd3", "pixart", "lumina2")),
    case("flux", {"length": 3}, gather=4),
    case("flux", ulysses=4),
    case("wan", gather=4),
    case("sd3", {"length": 3}, gather=2, ulysses=2, text="replicate"),
]
EIGHT = [
    case("sd3", {"length": 9, **ODD["sd3"]}, gather=8),
    case("sd3", {"length": 9, **ODD["sd3"]}, cfg=2, gather=2, ulysses=2),
]
REFUSED = {
    "qwen-ring2-length7-height24-width40": "ring attention is put together from parts without a mask",
    "flux-ulysses4": "transformer_blocks.0.attn has 2 heads, which ulysses=4 does not divide; degrees that fit: 1, 2",
    "wan-gather4": "3 image tokens cannot be spread over 4 ranks; use at most 3",
    "sd3-gather2-ulysses2-textreplicate-length3": "which text='replicate' forbids",
}


def work(rank: int, cases: list[Case], more: bool) -> Any:
    """The cases and, where there are `more`, what two ranks do besides: one launch for both."""
    controlled = controls(rank, FAMILIES, 2) if more else {}
    variants = variant_outcomes(rank, [{"ulysses": 2}, {"gather": 2}]) if more else {}
    return outcomes(rank, cases), controlled, variants


@pytest.fixture(scope="module")
def launched() -> dict[int, list[Any]]:
    """Number of ranks -> what `work` returned on each."""
    return {
        ranks: on_ranks(work, ranks, cases, ranks == 2, timeout=120)
        for ranks, cases in ((2, TWO), (4, FOUR), (8, EIGHT))
    }


@pytest.fixture(scope="module")
def found(launched: dict[int, list[Any]]) -> dict[str, list[Any]]:
    """Case -> outcome on each rank."""
    return {str(one): [rank[0][str(one)] for rank in ranks] for ranks in launched.values() for one in ranks[0][0]}


@pytest.fixture(scope="module")
def further(launched: dict[int, list[Any]]) -> list[Any]:
    """The controls and the variants, on each of two ranks."""
    return [rank[1:] for rank in launched[2]]


@pytest.mark.parametrize("name", [str(one) for one in (*TWO, *FOUR, *EIGHT) if str(one) not in REFUSED])
def test_equal_to_one_process(found: dict[str, list[Any]], name: str) -> None:
    for outcome in found[name]:
        assert isinstance(outcome, Outcome), outcome
        assert outcome.features["context parallel"]["calls spread"] > 0
        assert outcome.difference < TOLERANCE
    differences = {outcome.difference for outcome in found[name]}
    assert len(differences) == 1, "every rank has the same picture"


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_numbers(found: dict[str, list[Any]], name: str) -> None:
    for outcome in found[name]:
        assert REFUSED[name] in outcome


def test_text_is_whole_where_there_are_fewer_tokens_than_ranks(found: dict[str, list[Any]]) -> None:
    told = found["flux-gather4-length3"][0].features["context parallel"]["tokens of each rank"]
    assert told == "16 image, 3 text on every rank"


@pytest.mark.parametrize("name", FAMILIES)
def test_the_result_depends_on_the_exchange(further: list[Any], name: str) -> None:
    assert further[0][0][name] > 100 * TOLERANCE


@pytest.mark.parametrize("mode", ["ulysses2", "gather2"])
@pytest.mark.parametrize("name", ["flux_controlnet", "sd3_controlnet", "skip_first", "skip_last", "flux_ip_adapter"])
def test_variants_equal_one_process(further: list[Any], name: str, mode: str) -> None:
    for _, variant in further:
        outcome = variant[f"{name}-{mode}"]
        assert isinstance(outcome, Outcome), outcome
        assert outcome.features["context parallel"]["calls spread"] > 0
        assert outcome.difference < TOLERANCE
