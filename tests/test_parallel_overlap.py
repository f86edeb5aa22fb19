"""Attention exchanged in head groups: the result of one piece, started before it is waited for, and only where it is large."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parallel_cases import ODD, Case, Outcome, case, outcomes
from ranks import on_ranks
from tiny import build, run

from chitu_diffusion import Parallel, patch
from chitu_diffusion.parallel import exchange, overlap
from chitu_diffusion.parallel.collectives import ops
from chitu_diffusion.parallel.layout import Layout
from chitu_diffusion.parallel.overlap import LARGE, PART, bytes_sent, groups_for
from chitu_hooks import AttentionContext, GenerationError, PatchError
from chitu_hooks.state import ACTIVE

TOLERANCE = 1e-5
B, S, H, G, D = 2, 7, 16, 8, 4
SIZES = {2: (4, 3), 4: (2, 2, 2, 1)}
ODD_SIZES = {"length": 7}

CASES = [
    *(case(name, {**ODD_SIZES, **ODD[name]}, gather=2, overlap=2) for name in ("flux", "qwen", "sd3", "wan", "zimage")),
    case("qwen", gather=2, overlap=2),
    case("qwen", {**ODD_SIZES, **ODD["qwen"], "batch": 2}, gather=2, overlap=2, text="replicate"),
    case("sd3", {**ODD_SIZES, **ODD["sd3"]}, ulysses=2, overlap=2),
    case("sd3", ulysses=2, overlap=2, text="replicate"),
    case("qwen", {**ODD_SIZES, **ODD["qwen"]}, ulysses=2, overlap=2),
    case("flux", ulysses=2, overlap=2),
]
REFUSED = {"flux-ulysses2-overlap2": "overlap=2 does not divide; head groups that fit: 1"}


class Log:
    """The order in which exchanges are started and waited for, and attention runs."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def __call__(self, word: str, function: Any) -> Any:
        def logged(*args: Any) -> Any:
            self.words.append(word)
            return function(*args)

        return logged


class Ops:
    """The operators of the exchanges, with a log."""

    def __init__(self, log: Log) -> None:
        self.all_to_all_single = log("start", ops.all_to_all_single)
        self.all_gather_into_tensor = log("start", ops.all_gather_into_tensor)
        self.wait_tensor = log("wait", ops.wait_tensor)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(1, 2)


def pieces(rank: int) -> dict[str, Any]:
    """How far each way to exchange is from attention in one process, and the order of what it does, by head groups."""
    from chitu_diffusion.parallel import collectives

    generator = torch.Generator().manual_seed(0)
    text = 3
    q, k, v = (torch.randn(B, text + S, heads, D, generator=generator) for heads in (H, G, G))
    sizes, group = SIZES[torch.distributed.get_world_size()], torch.distributed.group.WORLD.group_name
    found: dict[str, Any] = {}
    expected = attend(q, k, v)
    first = text + sum(sizes[:rank])
    here = [*range(first, first + sizes[rank])]
    for N in (1, 2):
        for name in ("ulysses", "gather"):
            for shared in ("", "_shared", "_shared last"):
                log = Log()
                collectives.ops = Ops(log)
                front, extra = shared != "_shared last", shared != ""
                words = list(range(text)) if extra else []
                own = words + here if front else here + words
                told = (text, front) if name == "gather" else (rank, text, front)
                function = getattr(exchange, name + shared.removesuffix(" last"))
                arguments = [tensor[:, own] for tensor in (q, k, v)]
                if extra:
                    want = expected[:, own]
                else:
                    want = attend(q[:, text:], k[:, text:], v[:, text:])[:, [place - text for place in here]]
                got = function(*arguments, sizes, *(told if extra else ()), group, log("attend", attend), N)
                found[f"{name}{shared} {N}"] = float((got - want).abs().max()), log.words
    collectives.ops = ops
    return found


def automatic(rank: int) -> dict[str, Any]:
    """What auto decides: one piece for a tiny model, head groups where parts may be tiny; and what it reports."""
    found = {}
    pipe = build("qwen")
    for part in (PART, 64):
        overlap.PART = part
        overlap.LARGE = 8 * part
        with patch(pipe, parallel=Parallel(gather=2)) as handle:
            run("qwen", pipe, 2, **ODD_SIZES, **ODD["qwen"])
            features = {feature["name"]: feature for feature in handle.report().features}
        found[str(part)] = features["context parallel"]["tokens of each rank"]
    overlap.PART, overlap.LARGE = PART, LARGE
    return found


def unlike(rank: int) -> dict[str, Any]:
    """Layers that head groups do not fit: how far attention is from one process and in how many pieces it came, or why not."""
    generator = torch.Generator().manual_seed(0)
    found: dict[str, Any] = {}
    pipe, sizes = build("qwen"), SIZES[2]
    here = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    wholes = {"mask of heads": (H, G, H), "one mask": (H, G, 1), "odd heads": (6, 2, 1)}
    for name, (heads, keys, masks) in wholes.items():
        q, k, v = (torch.randn(B, S, count, D, generator=generator) for count in (heads, keys, keys))
        mask = torch.randn(B, masks, 1, S, generator=generator)
        expected = attend(q, k, v, mask)[:, here]
        for wished in ("auto", 2):
            log = Log()
            inner = log("attend", lambda q, k, v, ctx: attend(q, k, v, ctx.mask))
            with patch(pipe, parallel=Parallel(ulysses=2, overlap=wished)) as handle:
                feature = next(one for one in handle.features if one.name == "context parallel")
                ctx = AttentionContext(inner, mask, 0.0, False, None, True)
                ACTIVE.layout = Layout(rank, sizes, (0, 0), False, True, groups=2)
                try:
                    got = feature.attention(q[:, here], k[:, here], v[:, here], ctx)
                    found[f"{name} {wished}"] = float((got - expected).abs().max()), log.words
                except GenerationError as error:
                    found[f"{name} {wished}"] = str(error)
                finally:
                    ACTIVE.layout = None
    return found


def work(rank: int, cases: list[Case]) -> Any:
    return pieces(rank), outcomes(rank, cases), automatic(rank), unlike(rank)


@pytest.fixture(scope="module")
def found() -> list[Any]:
    return on_ranks(work, 2, CASES, timeout=120)


@pytest.fixture(scope="module")
def cut(found: list[Any]) -> list[Any]:
    """What `pieces` found on each of two ranks, and on each of four."""
    return [pieces for pieces, *_ in found] + on_ranks(pieces, 4)


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("shared", ["", "_shared", "_shared last"])
@pytest.mark.parametrize("name", ["ulysses", "gather"])
def test_groups_equal_one_piece(cut: list[Any], name: str, shared: str) -> None:
    assert len(cut) == 6
    for rank in cut:
        for N in (1, 2):
            far, words = rank[f"{name}{shared} {N}"]
            assert words.count("attend") == N
            assert far < TOLERANCE


@pytest.mark.multiprocess
@pytest.mark.slow
def test_what_comes_is_started_before_anything_attends(cut: list[Any]) -> None:
    for rank in cut:
        for shared in ("", "_shared"):
            attends = ["start", "start", "wait", "attend", "start", "wait", "attend", "start", "wait", "wait"]
            assert rank[f"ulysses{shared} 2"][1] == attends, "and what goes back is waited for after all of it"
            assert rank[f"gather{shared} 2"][1] == ["start", "start", "wait", "attend", "wait", "attend"]


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("name", [str(one) for one in CASES if str(one) not in REFUSED])
def test_pipelines_equal_one_process(found: list[Any], name: str) -> None:
    for _, cases, *_ in found:
        outcome = cases[name]
        assert isinstance(outcome, Outcome), outcome
        assert "heads in 2 groups" in outcome.features["context parallel"]["tokens of each rank"]
        assert outcome.difference < TOLERANCE


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_heads_that_do_not_divide_are_refused(found: list[Any], name: str) -> None:
    for _, cases, *_ in found:
        assert REFUSED[name] in cases[name]


@pytest.mark.multiprocess
@pytest.mark.slow
def test_auto_divides_what_is_large(found: list[Any]) -> None:
    for _, _, automatic, _ in found:
        assert "groups" not in automatic[str(PART)]
        assert "heads in 4 groups" in automatic["64"]


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_layer_that_groups_do_not_fit_comes_in_one_piece_or_is_refused(found: list[Any]) -> None:
    for *_, layers in found:
        for wished in ("auto", 2):
            far, words = layers[f"one mask {wished}"]
            assert far < TOLERANCE and words == ["attend", "attend"]
        for name in ("mask of heads", "odd heads"):
            far, words = layers[f"{name} auto"]
            assert far < TOLERANCE and words == ["attend"], name
        assert "overlap=2 does not divide a mask that differs between heads; use overlap=1" in layers["mask of heads 2"]
        assert "overlap=2 does not divide 6 heads on 2 key heads over ulysses=2; use overlap=1" in layers["odd heads 2"]


def test_groups_leave_parts_that_are_worth_a_collective() -> None:
    row = 24 * 128 * 2  # FLUX.1 in bfloat16, on two ranks
    assert groups_for(bytes_sent(4096 + 512, row, row, 2, 1), {12}) == 1, "27 MiB both ways"
    assert groups_for(bytes_sent(4096 + 512, row, row, 1, 2), {24}) == 1, "27 MiB"
    assert groups_for(bytes_sent(16384 + 512, row, row, 2, 1), {12}) == 3, "25 MiB on the way back"
    assert groups_for(bytes_sent(16384 + 512, row, row, 1, 2), {24}) == 4, "gather sends keys and values"
    assert groups_for(bytes_sent(16384 + 512, row, row, 1, 2), {24, 10}) == 2, "every layer's heads divide"
    assert groups_for(bytes_sent(16384 + 512, row, row, 1, 2), {7}) == 1
    shared = row // 3  # 24 heads on 8 key heads
    assert groups_for(bytes_sent(16384 + 512, row, shared, 2, 1), {12, 4}) == 2
    assert groups_for(bytes_sent(16384 + 512, row, shared, 1, 2), {24, 8}) == 1, "33 MiB of keys and values"


@pytest.mark.parametrize(
    ("degrees", "overlap", "message"),
    [
        ({"ulysses": 2}, 0, "overlap=0 is to be a number of head groups, 1 or more; leave it out to divide by size"),
        ({"ulysses": 2}, True, "overlap=True is to be"),
        ({"ring": 2}, 2, "overlap=2 divides the heads of ulysses or gather alone, and this is ring 2"),
        ({"gather": 2, "ulysses": 2}, 2, "and this is ulysses 2 × gather 2"),
        ({"cfg": 2}, 2, "and this is cfg 2"),
    ],
)
def test_other_overlap_is_refused(degrees: dict[str, int], overlap: Any, message: str) -> None:
    with pytest.raises(PatchError) as raised:
        Parallel(**degrees, overlap=overlap)
    assert message in str(raised.value)
