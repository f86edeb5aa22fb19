"""LoRA adapters before and after patching, removed, saved, and scaled in the middle of a call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from probes import Keep, Scale, Watch, difference
from tiny import build, run

from chitu_hooks import patch

peft = pytest.importorskip("peft")

NAMES = ["flux", "wan", "sd3", "qwen"]


def add(pipe: Any) -> None:
    torch.manual_seed(0)
    targets = ["to_q", "to_k", "to_v", "to_out.0"]
    config = peft.LoraConfig(r=4, lora_alpha=4, init_lora_weights=False, target_modules=targets)
    pipe.transformer.add_adapter(config, adapter_name="one")


def features() -> list[Any]:
    return [Watch(), Scale(0.9), Keep(0, 2)]


@pytest.mark.parametrize("name", NAMES)
def test_adding_and_deleting_in_either_order(name: str) -> None:
    pipe = build(name)
    stock = run(name, pipe, 4)
    add(pipe)
    keys = list(pipe.transformer.state_dict())
    before = patch(pipe, features())
    patched_after = run(name, pipe, 4)
    assert list(pipe.transformer.state_dict()) == keys
    before.undo()
    with_lora = run(name, pipe, 4)
    assert not torch.equal(with_lora, stock)
    assert not torch.equal(with_lora, patched_after)
    pipe.transformer.delete_adapters("one")
    stock_keys = list(pipe.transformer.state_dict())  # peft leaves its wrappers in place

    pipe = build(name)
    watch = Watch()
    handle = patch(pipe, [watch, Scale(0.9), Keep(0, 2)])
    without = run(name, pipe, 4)
    add(pipe)
    assert list(pipe.transformer.state_dict()) == keys
    seen = watch.counts["attention"]
    assert torch.equal(run(name, pipe, 4), patched_after), "bit for bit as in the other order"
    assert watch.counts["attention"] > seen, "the hooks are still there"
    pipe.transformer.delete_adapters("one")
    assert torch.equal(run(name, pipe, 4), without)
    handle.undo()
    assert list(pipe.transformer.state_dict()) == stock_keys
    assert torch.equal(run(name, pipe, 4), stock)


@pytest.mark.parametrize("name", ["flux", "wan"])
def test_saving_a_patched_pipeline(name: str, tmp_path: Path) -> None:
    pipe = build(name)
    stock = run(name, pipe, 2)
    with patch(pipe, features()):
        run(name, pipe, 2)
        pipe.save_pretrained(tmp_path / "pipe")
        pipe.transformer.save_pretrained(tmp_path / "transformer")
    assert not any(b"chitu" in file.read_bytes() for file in tmp_path.rglob("*.json"))
    transformer = type(pipe.transformer).from_pretrained(tmp_path / "transformer")
    absent = {key: None for key, component in pipe.components.items() if component is None}
    loaded = type(pipe).from_pretrained(tmp_path / "pipe", **absent)
    loaded.set_progress_bar_config(disable=True)
    assert type(loaded) is type(pipe)
    for twin in (loaded.transformer, transformer):
        loaded.transformer = twin
        for (key, one), (other_key, other) in zip(pipe.transformer.state_dict().items(), twin.state_dict().items()):
            assert key == other_key and torch.equal(one, other)
        # Loaded weights lie elsewhere in memory, and a matrix product may round differently for that, patched or not.
        assert difference(run(name, loaded, 2), stock) < 2e-6


def test_a_scale_changed_in_the_middle_of_a_call() -> None:
    def callback(pipe: Any, step: int, timestep: Any, kwargs: Any) -> dict[str, Any]:
        pipe.transformer.set_adapters("one", weights=0.1 if step < 2 else 1.0)
        return {}

    pipe = build("flux")
    add(pipe)
    pipe.transformer.set_adapters("one", weights=1.0)
    constant = run("flux", pipe, 4)
    changed = run("flux", pipe, 4, callback_on_step_end=callback)
    assert not torch.equal(constant, changed)
    with patch(pipe, [Watch(), Keep(*range(4))]):
        assert torch.equal(run("flux", pipe, 4, callback_on_step_end=callback), changed)
    pipe.transformer.set_adapters("one", weights=1.0)
    with patch(pipe, [Keep(0, 2)]):
        one = run("flux", pipe, 4, callback_on_step_end=callback)
        pipe.transformer.set_adapters("one", weights=1.0)
        assert torch.equal(run("flux", pipe, 4, callback_on_step_end=callback), one)
