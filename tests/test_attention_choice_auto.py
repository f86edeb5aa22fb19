"""`attention="auto"`: what the table says is what runs, and where it says nothing, nothing changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from probes import difference
from test_attention_choice import STEPS, Narrow, latents, masked_arguments
from test_attention_choice_compiled import compiled
from tiny import build, run
from torch._dynamo.utils import counters

from chitu_diffusion import patch
from chitu_diffusion.attention import AttentionCall, choice, fastest, kernels
from chitu_diffusion.attention.fastest import Row, read_rows, rows_for, write_rows
from chitu_diffusion.attention.kernel import MASKS

Table = Any


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Table:
    """``table(fast=Narrow(…), …)(rows…)``: a table file of one's own, for the CPU, and kernels of one's own to name in it."""
    path = tmp_path / "fastest.yaml"
    path.write_text("# a header\nrows: []\n")
    monkeypatch.setattr(fastest, "FILE", path)
    monkeypatch.setattr(choice.AutoAttention, "device", "cpu")
    monkeypatch.setattr(choice, "fastest", lambda: rows_for("9.0"))

    def fill(*rows: Row, **fakes: Narrow) -> None:
        for name, fake in fakes.items():
            fake.name = name
        known = {**kernels(), **fakes}
        monkeypatch.setattr(choice, "kernels", lambda: known)
        write_rows("9.0", rows)

    return fill


def row(*names: str, dtype: str = "float32", head_dim: int = 16, tokens: int = 1, capability: str = "9.0") -> Row:
    return Row(capability, dtype, head_dim, tokens, names)


def chosen(handle: Any) -> dict[str, str]:
    return handle.report().features[0].get("chosen", {})


def test_the_first_kernel_of_the_row_runs(table: Table) -> None:
    pipe, fast, slow = build("flux"), Narrow(), Narrow()
    before = run("flux", pipe, STEPS)
    table(row("fast", "slow"), fast=fast, slow=slow)
    with patch(pipe, attention="auto") as handle:
        assert difference(run("flux", pipe, STEPS), before) < 1e-4
        assert chosen(handle) == {"float32 2×16 (5 of 5 layers)": "fast"}
    assert len(fast.calls) == 5 * STEPS * 2 and slow.calls == []


def test_a_mask_goes_to_the_next_that_takes_it(table: Table) -> None:
    pipe, fast, slow = build("pixart"), Narrow(), Narrow(masks=MASKS)
    before = run("pixart", pipe, STEPS)
    table(row("fast", "slow"), fast=fast, slow=slow)
    with patch(pipe, attention="auto") as handle:
        assert difference(run("pixart", pipe, STEPS), before) < 1e-4
        assert chosen(handle) == {
            "float32 4×8 (2 of 4 layers)": "fast",
            "float32 4×8 additive mask (2 of 4 layers)": "slow",
        }
    assert {call.mask for call in fast.calls} == {""} and {call.mask for call in slow.calls} == {"additive"}


def test_a_mask_that_none_takes_is_left_to_torch(table: Table) -> None:
    pipe, fast = build("qwen"), Narrow()
    before = latents(pipe, masked_arguments("qwen"))
    table(row("fast"), fast=fast)
    with patch(pipe, attention="auto") as handle:
        assert torch.equal(latents(pipe, masked_arguments("qwen")), before)
        assert set(chosen(handle).values()) == {"torch's own choice"}
    assert fast.calls == []


@pytest.mark.parametrize(
    "rows, names",
    [
        ((row("fast", tokens=1), row("slow", tokens=50)), {"slow"}),
        ((row("fast", tokens=1), row("slow", tokens=5000)), {"fast"}),
        ((row("fast", tokens=5000),), {"torch's own choice"}),
        ((row("fast", head_dim=8), row("slow", head_dim=32)), {"slow"}),
        ((row("fast", head_dim=8),), {"torch's own choice"}),
        ((row("fast", head_dim=16, tokens=5000), row("slow", head_dim=32)), {"torch's own choice"}),
        ((row("fast", dtype="bfloat16"), row("slow")), {"slow"}),
        ((row("fast", capability="10.0"), row("slow")), {"slow"}),
        ((row("fast", capability="10.0"),), {"torch's own choice"}),
        ((row("lossy", "slow"),), {"slow"}),
        ((row("gone", "broken", "unheard-of", "slow"),), {"slow"}),
    ],
)
def test_the_row_that_fits(table: Table, rows: tuple[Row, ...], names: set[str]) -> None:
    """A picture of 16 × 16 pixels with 6 text tokens is attention of 70 tokens."""

    class Broken(Narrow):
        def load(self) -> None:
            raise ImportError("undefined symbol")

    lossy = Narrow()
    lossy.exactness = "lossy"
    pipe = build("flux")
    before = run("flux", pipe, STEPS)
    fakes = {"fast": Narrow(), "slow": Narrow(), "lossy": lossy, "gone": Narrow(unusable="is gone"), "broken": Broken()}
    table(*rows, **fakes)
    write_rows("10.0", [r for r in rows if r.capability == "10.0"])
    write_rows("9.0", [r for r in rows if r.capability == "9.0"])
    with patch(pipe, attention="auto") as handle:
        assert difference(run("flux", pipe, STEPS), before) < 1e-4
        assert set(chosen(handle).values()) == names
        skipped = handle.report().features[0].get("measured, and not usable here", {})
    assert {name for name, fake in fakes.items() if fake.calls} == names - {"torch's own choice"}
    if "gone" in rows[0].kernels:
        assert skipped == {
            "gone": "is gone",
            "broken": "is installed and does not load: undefined symbol",
            "unheard-of": "is not known",
        }


def test_a_backend_that_the_user_set_wins(table: Table) -> None:
    pipe, fast = build("flux"), Narrow()
    default = _AttentionBackendRegistry._active_backend
    try:
        pipe.transformer.set_attention_backend("_native_math")
    finally:
        _AttentionBackendRegistry.set_active_backend(default)
    before = run("flux", pipe, STEPS)
    table(row("fast"), fast=fast)
    with patch(pipe, attention="auto") as handle:
        assert torch.equal(run("flux", pipe, STEPS), before)
        assert handle.report().features[0]["left to the backend set in diffusers"] == {"_native_math": 5}
        assert fast.calls == []
        pipe.transformer.reset_attention_backend()
        run("flux", pipe, STEPS)
        assert len(fast.calls) == 5 * STEPS * 2, "and it wins only while it is set"


@pytest.mark.parametrize("name", ["flux", "qwen", "wan"])
def test_without_measurements_nothing_changes(name: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("there may be measurements for this device")
    pipe = build(name)
    before = run(name, pipe, STEPS)
    with patch(pipe, attention="auto") as handle:
        assert torch.equal(run(name, pipe, STEPS), before)
        (feature,) = handle.report().features
    assert feature["table"] == "no measurements for this device: torch's own choice is left"
    assert set(feature["chosen"].values()) == {"torch's own choice"}


def test_compiled(table: Table) -> None:
    """The kernel of the table is in the graphs, there are as many of them, and the report knows what was chosen."""
    torch._dynamo.reset()
    counters.clear()
    pipe = build("pixart", 12)
    before = run("pixart", pipe, STEPS)
    run("pixart", compiled(pipe), STEPS)
    stock = counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    counters.clear()
    pipe = build("pixart", 12)
    table(row("fast", "slow"), fast=Narrow(), slow=Narrow(masks=MASKS))
    with patch(compiled(pipe), attention="auto") as handle:
        out = run("pixart", pipe, STEPS)
        assert difference(out, before) < 1e-4
        assert not torch.equal(out, before), "another kernel, another rounding"
        assert counters["stats"]["unique_graphs"] == stock
        assert set(chosen(handle).values()) == {"fast", "slow"}
        bigger = {"height": 32, "width": 32}
        assert run("pixart", pipe, STEPS, **bigger).shape != out.shape
    torch._dynamo.reset()


def test_writing_replaces_one_device(table: Table, tmp_path: Path) -> None:
    table(row("a"), row("b", tokens=64))
    write_rows("10.0", [row("c", capability="10.0")])
    write_rows("9.0", [row("d", head_dim=64)])
    assert read_rows() == [row("c", capability="10.0"), row("d", head_dim=64)]
    assert fastest.FILE.read_text().startswith("# a header\nrows:\n")
    write_rows("9.0", [])
    write_rows("10.0", [])
    assert read_rows() == [] and fastest.FILE.read_text() == "# a header\nrows: []\n"


def test_the_shipped_table_is_sound() -> None:
    for found in read_rows():
        assert set(found.kernels) <= set(kernels())
        assert all(kernels()[name].exactness != "lossy" for name in found.kernels)
        assert found.dtype in ("bfloat16", "float16", "float32") and found.tokens > 0


def test_rows_do_not_reach_into_smaller_head_dims(table: Table) -> None:
    table(row("fast", head_dim=64), row("slow", head_dim=128))
    small, large = (AttentionCall(torch.float32, "cpu", dim, 1, 1, dim) for dim in (40, 72))
    by_dim = {found.head_dim: found for found in rows_for("9.0")}
    assert by_dim[64].fits(small, 9) and not by_dim[128].fits(small, 9)
    assert by_dim[128].fits(large, 9) and not by_dim[64].fits(large, 9)
