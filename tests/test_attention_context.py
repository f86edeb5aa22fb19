"""What an attention feature is told: the layer, the kind of attention, masks and shapes; and that it acts alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from probes import Formula, Scale, SdpaCounter, difference
from tiny import ALL, build, run

from chitu_hooks import Feature, Order, patch


class Notes(Feature):
    """Writes down where it is called, and with which shapes."""

    name = "notes"
    order = Order.KERNEL

    def __init__(self) -> None:
        self.sites: dict[str, int] = {}
        self.kinds: set[str] = set()
        self.spans: set[tuple[int, int]] = set()

    def attention(self, q_BSHD: torch.Tensor, k_BTHD: torch.Tensor, v_BTHD: torch.Tensor, ctx: Any) -> None:
        assert q_BSHD.dim() == k_BTHD.dim() == 4
        assert k_BTHD.shape == v_BTHD.shape
        assert q_BSHD.shape[2] % k_BTHD.shape[2] == 0, "heads are the third dimension"
        if ctx.mask is not None:
            full = (q_BSHD.shape[0], q_BSHD.shape[2], q_BSHD.shape[1], k_BTHD.shape[1])
            torch.broadcast_to(ctx.mask, full)
        self.sites[ctx.site.path] = int(ctx.site.layer)
        self.kinds.add(kind := ctx.kind(q_BSHD.shape[1], k_BTHD.shape[1]))
        if kind != "joint":  # no hook map tells the order here
            self.spans.add(ctx.text_span(q_BSHD.shape[1]))


KINDS = {"wan": {"self", "cross"}, "pixart": {"self", "cross"}, "ltx": {"self", "cross"}, "sana": {"cross"}}
KINDS["hunyuan_dit"] = {"self", "cross"}
OWN = {"mochi": 2}
"""Calls of attention in modules that have no processor, in two steps: reported as out of reach."""
JOINT_AND_SELF = ("sd3", "auraflow", "chroma", "flux2", "flux2_klein", "hidream", "hunyuan_image")
"""Their first blocks attend jointly; later ones, or second attention layers, see one tensor of both."""


@pytest.mark.parametrize("name", ALL)
def test_every_layer_is_told_apart(name: str) -> None:
    pipe, notes = build(name), Notes()
    with patch(pipe, [notes]) as handle:
        run(name, pipe, 2)
        reachable = {site.path: int(site.layer) for site in handle.sites.attention if site.reachable}
    assert notes.sites == reachable
    assert len(set(reachable.values())) == len(reachable)


@pytest.mark.parametrize("name", ALL)
def test_kinds_of_attention(name: str) -> None:
    pipe, notes = build(name), Notes()
    with patch(pipe, [notes]):
        run(name, pipe, 2, length=7)
    if name in KINDS:
        assert notes.kinds == KINDS[name]
        assert notes.spans == {(0, 0)}
    elif name in JOINT_AND_SELF:
        assert notes.kinds == {"joint", "self"}
    else:
        assert notes.kinds <= {"joint", "self"}


@pytest.mark.parametrize("name", ALL)
def test_attention_written_out_agrees(name: str) -> None:
    """Masks, scales, grouped heads and layouts arrive whole: a formula that uses them agrees with the stock kernel."""
    pipe = build(name)
    stock = run(name, pipe, 2, length=7)
    with patch(pipe, [Formula()]), SdpaCounter() as sdpa:
        result = run(name, pipe, 2, length=7)
    assert sdpa.calls == OWN.get(name, 0), "no attention of the denoiser is left to the stock kernel"
    assert difference(result, stock) < 1e-4


def test_two_attention_features_nest() -> None:
    pipe = build("flux")
    with patch(pipe, [Scale(0.25)]):
        quarter = run("flux", pipe, 2)
    outer, inner = Scale(0.5), Scale(0.5)
    outer.name, outer.order = "outer", Order.CACHE
    with patch(pipe, [inner, outer]):
        assert torch.equal(run("flux", pipe, 2), quarter)
