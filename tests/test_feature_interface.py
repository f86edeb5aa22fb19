"""The feature interface is the ABI between the engine and everything else: it changes on purpose or not at all."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
from probes import Keep, Scale, Watch
from snapshot import changes, snapshot
from tiny import build, run

import chitu_hooks
from chitu_diffusion.attention.parts import TorchInParts
from chitu_hooks import Feature, HookMap, Order, Refusal, Stack, patch, seam

METHODS = {
    "bind": "(self, sites: 'Sites', hook_map: 'HookMap') -> 'Refusal | None'",
    "begin": "(self, generation: 'Generation') -> 'None'",
    "step_in": "(self, step: 'StepCall') -> 'None'",
    "step_out": "(self, step: 'StepCall') -> 'None'",
    "denoiser_in": "(self, call: 'Call') -> 'Any | None'",
    "denoiser_out": "(self, call: 'Call') -> 'None'",
    "trunk_in": "(self, call: 'Call', streams: 'Streams') -> 'Streams | None'",
    "front_out": "(self, call: 'Call', residual: 'Streams') -> 'None'",
    "trunk_out": "(self, call: 'Call', streams: 'Streams') -> 'Streams | None'",
    "block_in": "(self, call: 'Call', block: 'BlockSite', inputs: 'BlockInputs') -> 'Streams | None'",
    "block_out": "(self, call: 'Call', block: 'BlockSite', outputs: 'Streams') -> 'Streams | None'",
    "attention_layer": "(self, frame: 'Frame', rest: 'Callable[[], Any]') -> 'Any | None'",
    "attention": "(self, q_BSHD: 'torch.Tensor', k_BTHD: 'torch.Tensor', v_BTHD: 'torch.Tensor', "
    "ctx: 'AttentionContext') -> 'torch.Tensor | None'",
    "attention_with_lse": "(self, q_BSHD: 'torch.Tensor', k_BTHD: 'torch.Tensor', v_BTHD: 'torch.Tensor', "
    "ctx: 'AttentionContext') -> 'tuple[torch.Tensor, torch.Tensor] | None'",
    "end": "(self, generation: 'Generation') -> 'None'",
    "report": "(self) -> 'dict[str, Any]'",
}

PUBLIC = [
    "AttentionContext",
    "BlockInputs",
    "Branch",
    "Call",
    "ChituError",
    "ChituWarning",
    "Exactness",
    "Feature",
    "Generation",
    "GenerationError",
    "Handle",
    "HookMap",
    "HookMapError",
    "Order",
    "PatchError",
    "Refusal",
    "RefusedError",
    "Report",
    "Sites",
    "Stack",
    "Step",
    "StepCall",
    "Streams",
    "load_hook_map",
    "patch",
]


def test_methods_and_their_signatures() -> None:
    found = {name: str(inspect.signature(m)) for name, m in vars(Feature).items() if inspect.isfunction(m)}
    assert found == METHODS


def test_attributes_and_their_defaults() -> None:
    names = {name for name in vars(Feature) if not name.startswith("__") and name not in METHODS}
    assert {name: getattr(Feature, name) for name in names} == {
        "name": "feature",
        "exactness": "exact",
        "order": Order.CACHE,
        "skips_trunk": False,
        "front": 0,
        "back": 0,
        "reuses": "residual",
    }
    assert {order.name: int(order) for order in Order} == {
        "CLOCK": 0,
        "GUIDANCE": 10,
        "CACHE": 20,
        "CONTEXT": 30,
        "KERNEL": 40,
    }
    assert [field.name for field in dataclasses.fields(Refusal)] == ["reason", "remedy"]


def test_public_names() -> None:
    assert sorted(chitu_hooks.__all__) == PUBLIC
    assert all(hasattr(chitu_hooks, name) for name in PUBLIC)


def test_fields_of_hook_maps() -> None:
    assert [field.name for field in dataclasses.fields(HookMap)] == [
        "name",
        "pipelines",
        "denoisers",
        "stacks",
        "conditioning",
        "guidance",
        "exit",
        "exit_role",
        "trunk_arguments",
        "source",
    ]
    assert [field.name for field in dataclasses.fields(Stack)] == [
        *("path", "streams", "returns", "order", "refiner", "aligned"),
    ]
    hook_map = HookMap("x", ("X",))
    with pytest.raises(dataclasses.FrozenInstanceError):
        hook_map.name = "y"  # type: ignore[misc]


def test_the_signature_of_patch() -> None:
    parameters = inspect.signature(patch).parameters
    assert {name: p.default for name, p in parameters.items()} == {
        "pipe": inspect.Parameter.empty,
        "features": (),
        "hook_map": None,
        "registry": (),
    }


class OnlyClock(Feature):
    name = "clock"

    def begin(self, generation: object) -> None:
        pass


class OnlyDenoiser(Feature):
    name = "denoiser"

    def denoiser_in(self, call: object) -> None:
        pass


@pytest.mark.parametrize(
    ("feature", "denoiser", "blocks", "processors"),
    [
        (Feature(), False, False, False),
        (OnlyClock(), False, False, False),
        (OnlyDenoiser(), True, False, False),
        (Scale(), True, False, True),
        (Keep(), True, True, False),
        (Watch(), True, True, True),
    ],
    ids=["nothing", "clock", "denoiser", "attention", "skip", "all"],
)
def test_only_the_hooks_that_are_needed_are_installed(
    feature: Feature, denoiser: bool, blocks: bool, processors: bool
) -> None:
    pipe = build("flux")
    before = snapshot(pipe)
    with patch(pipe, [feature]):
        touched = changes(before, snapshot(pipe))
    assert any(place.startswith(f"transformer.{seam.SLOT}") for place in touched) == denoiser
    assert any(seam.SLOT in place and "blocks" in place for place in touched) == blocks
    assert any("processor" in place for place in touched) == processors


def test_features_run_in_order_and_back() -> None:
    seen = []

    class Place(Feature):
        def __init__(self, name: str, order: Order) -> None:
            self.name, self.order = name, order

        def denoiser_in(self, call: object) -> None:
            seen.append(f"{self.name} in")

        def denoiser_out(self, call: object) -> None:
            seen.append(f"{self.name} out")

    with patch(
        build("wan"), [Place("kernel", Order.KERNEL), Place("clock", Order.CLOCK), Place("cache", Order.CACHE)]
    ) as h:
        run("wan", h.pipe, 1, guided=False)
    assert seen == ["clock in", "cache in", "kernel in", "kernel out", "cache out", "clock out"]


def test_a_feature_that_gives_parts_only_is_run() -> None:
    class InParts(Feature):
        name, order = "in parts", Order.CONTEXT

        def attention(self, q_BSHD, k_BTHD, v_BTHD, ctx):  # type: ignore[no-untyped-def]
            return ctx.next_with_lse(q_BSHD, k_BTHD, v_BTHD)[0]

    class Parts(Feature):
        name, order, calls = "parts", Order.KERNEL, 0

        def attention_with_lse(self, q_BSHD, k_BTHD, v_BTHD, ctx):  # type: ignore[no-untyped-def]
            self.calls += 1
            return None

    parts = Parts()
    with patch(build("flux"), [InParts(), parts, TorchInParts()]) as handle:
        run("flux", handle.pipe, 2)
    assert parts.calls > 0
