"""Published constants, who may use them, and measuring them where there are none."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import yaml
from caches import STEPS, Log
from tiny import build, call_arguments, run
from variants import wan_two_experts

from chitu_diffusion import MagCache, Static, TeaCache, patch
from chitu_diffusion.flexcache.constants import data_folder
from chitu_hooks import Call, ChituWarning, Feature, Order, PatchError, RefusedError

FILES = sorted(data_folder().glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_entry_has_a_source_and_the_right_size(path: Path) -> None:
    found = yaml.safe_load(path.read_text())
    assert (data_folder().parent / f"{path.stem}.py").is_file(), "beside the hook map of the family"
    assert set(found) <= {"magcache", "schedules", "teacache"}
    for entry in found.get("magcache", ()):
        assert entry["source"].startswith("https://") and entry["match"]["config"]
        assert all(len(ratios) == entry["steps"] - 1 and min(ratios) > 0.3 for ratios in entry["ratios"])
    for entry in found.get("teacache", ()):
        assert entry["source"].startswith("https://") and entry["match"]["config"]
        assert len(entry["coefficients"]) == 5 and all(isinstance(c, float) for c in entry["coefficients"])
    for name, entry in found.get("schedules", {}).items():
        assert entry["source"].startswith("https://")
        assert len(entry["steps"]) == len(set(entry["steps"])) == int(name.rpartition("-")[2])
        assert entry["steps"] == sorted(entry["steps"]) and entry["steps"][0] == 0
        assert entry["steps"][-1] == entry["of"] - 1


def flux_dev_on_meta(cls: Any = diffusers.FluxPipeline, **config: Any) -> Any:
    with torch.device("meta"):
        transformer = diffusers.FluxTransformer2DModel(**{"guidance_embeds": True, **config})
    parts = dict.fromkeys(("vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))
    return cls(transformer=transformer, scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), **parts)


def test_the_entry_is_found_by_pipeline_and_config() -> None:
    with patch(flux_dev_on_meta(), cache=MagCache()) as handle:
        dev = handle.features[0]._lists  # type: ignore[attr-defined]
    assert dev[0][0] == 1.21094 and len(dev[0]) == 27
    with patch(flux_dev_on_meta(diffusers.FluxKontextPipeline), cache="magcache") as handle:
        assert handle.features[0]._lists[0][0] == 1.19531  # type: ignore[attr-defined]
    for other in (flux_dev_on_meta(guidance_embeds=False), flux_dev_on_meta(num_layers=8), build("flux"), build("sd3")):
        with pytest.raises(RefusedError, match=r"magcache needs constants of this model and none are published for "
                           r"transformer \w+ of [\d+]+ blocks; measure them once with handle.calibrate.*chitu calibrate, "
                           r"or use static, fbcache, .*, which need none"):  # fmt: skip
            patch(other, cache=MagCache())


def test_ratios_are_stretched_to_other_numbers_of_steps() -> None:
    with patch(flux_dev_on_meta(), cache=MagCache()) as handle:
        strategy: Any = handle.features[0]
        ratios = strategy._lists[0]
        assert [strategy.ratio(i, 28) for i in range(1, 28)] == list(ratios)
        assert strategy.ratio(13, 14) == ratios[-1]
        assert [strategy.ratio(i, 55) for i in (2, 4, 54)] == [ratios[0], ratios[1], ratios[-1]]


@pytest.mark.parametrize("name", ["flux", "wan"])
@pytest.mark.filterwarnings("ignore::chitu_hooks.ChituWarning")
def test_published_teacache_takes_the_signal_that_it_was_fitted_for(name: str) -> None:
    """The signal of the published entry, on the tiny model: what its module or argument gives by plain hooks."""
    entry = yaml.safe_load((data_folder() / f"{name}.yaml").read_text())["teacache"][0]
    pipe, seen = build(name), []
    with patch(pipe, cache=TeaCache(threshold=1e9, coefficients=(1.0, 0.0))) as handle:
        strategy: Any = next(f for f in handle.features if f.name == "teacache")
        strategy._signal = entry["signal"]
        original = strategy.signal
        strategy.signal = lambda call, streams: seen.append(original(call, streams)) or seen[-1]
        run(name, pipe, 2, guided=False)
    stock, expected = build(name), []
    if name == "flux":
        module = stock.transformer.transformer_blocks[0].norm1
        module.register_forward_hook(lambda _, args, output: expected.append(output[0]))
    else:
        stock.transformer.blocks[0].register_forward_pre_hook(lambda _, args: expected.append(args[2]))
    run(name, stock, 1, guided=False)
    assert torch.equal(seen[0], expected[0]) and not torch.equal(seen[1], seen[0])


def test_published_teacache_is_found() -> None:
    with patch(flux_dev_on_meta(), cache="teacache") as handle:
        assert handle.features[0]._coefficients[0] == 498.651651  # type: ignore[attr-defined]
    with pytest.raises(RefusedError, match="teacache needs constants of this model"):
        patch(build("wan"), cache="teacache")


def by_hand(name: str, steps: int) -> list[list[float]]:
    """Ratios measured with plain hooks on the blocks of a pipeline of one stack."""
    pipe, entries, norms, branches = build(name), [], {}, 2
    ratios: dict[int, list[float]] = {}
    blocks = pipe.transformer.blocks
    calls = [0]
    blocks[0].register_forward_pre_hook(lambda _, args: entries.append(args[0].clone()))

    def last(_: Any, args: Any, output: torch.Tensor) -> None:
        branch, norm = calls[0] % branches, (output - entries[-1]).norm(dim=-1)
        calls[0] += 1
        if branch in norms:
            ratios.setdefault(branch, []).append(float((norm / norms[branch]).mean()))
        norms[branch] = norm

    blocks[-1].register_forward_hook(last)
    run(name, pipe, steps)
    return [ratios[0], ratios[1]]


def test_calibrate_measures_what_the_definition_says(tmp_path: Path) -> None:
    file = tmp_path / "wan.yaml"
    pipe = build("wan")
    stock = run("wan", pipe, STEPS)
    with patch(pipe) as handle:
        found = handle.calibrate([call_arguments("wan", STEPS)], file)
        assert torch.equal(run("wan", pipe, STEPS), stock)
    assert yaml.safe_load(file.read_text()) == found
    assert found["magcache"]["steps"] == STEPS
    for measured, expected in zip(found["magcache"]["ratios"], by_hand("wan", STEPS), strict=True):
        assert measured == pytest.approx(expected, abs=2e-5)
    log = Log()
    with patch(pipe, cache=MagCache(constants=str(file), threshold=0.5), features=(log,)), warnings.catch_warnings():
        warnings.simplefilter("error", ChituWarning)
        assert not torch.equal(run("wan", pipe, 20), stock)
    assert log.hits > 0


def test_branches_are_held_equally_long_whatever_their_own_ratios(tmp_path: Path) -> None:
    pipe, log, file = build("wan"), Log(), tmp_path / "wan.yaml"
    with patch(pipe) as handle:
        found = handle.calibrate([call_arguments("wan", STEPS)], file)
    found["magcache"]["ratios"][1] = [5.0] * (STEPS - 1)
    file.write_text(yaml.safe_dump(found))
    with patch(pipe, cache=MagCache(constants=str(file), threshold=0.5), features=(log,)):
        run("wan", pipe, STEPS)
    first, second = dict.fromkeys(branch for branch, *_ in log.calls)
    assert log.computed(first) == log.computed(second) and log.hits


@pytest.mark.parametrize("name", ["flux", "flux2_klein", "sd3", "zimage", "pixart", "sana"])
def test_a_polynomial_is_measured_too(name: str, tmp_path: Path) -> None:
    pipe, log = build(name), Log()
    with patch(pipe) as handle:
        found = handle.calibrate([call_arguments(name, 20)], tmp_path / "c.yaml")["teacache"]
    low, high = found["domain"]
    assert 0 < low < high and len(found["coefficients"]) == 5
    with patch(pipe, cache=TeaCache(constants=str(tmp_path / "c.yaml"), threshold=1.0), features=(log,)) as handle:
        strategy: Any = next(f for f in handle.features if f.name == "teacache")
        assert strategy.predicted(2 * high) == strategy.predicted(high), "a polynomial is not to be trusted beyond"
        assert all(0 < strategy.predicted(low + (high - low) * i / 10) < 3 for i in range(11))
        run(name, pipe, 20)
    assert log.hits


@pytest.mark.parametrize("name", ["flux", "flux2_klein", "sd3", "zimage", "pixart", "sana"])
def test_calibrate_works_on_other_trunks(name: str, tmp_path: Path) -> None:
    pipe, log = build(name), Log()
    with patch(pipe) as handle:
        one = handle.calibrate([call_arguments(name, STEPS)])["magcache"]["ratios"]
        two = handle.calibrate([call_arguments(name, STEPS, prompt=p) for p in (0, 1)], tmp_path / "c.yaml")
    assert all(len(ratios) == STEPS - 1 and all(0.1 < r < 10 for r in ratios) for ratios in one)
    assert two["magcache"]["ratios"] != one
    params = MagCache(constants=str(tmp_path / "c.yaml"), threshold=5.0)
    with patch(pipe, cache=params, features=(log,)):
        run(name, pipe, STEPS)
    assert log.hits


@pytest.mark.filterwarnings("ignore::chitu_hooks.ChituWarning")
def test_two_experts_have_ratios_of_their_own(tmp_path: Path) -> None:
    pipe = wan_two_experts().pipe
    with pytest.raises(RefusedError, match="transformer_2 WanTransformer3DModel of 3 blocks"):
        patch(pipe, cache="magcache")
    with patch(pipe) as handle:
        found = handle.calibrate([call_arguments("wan", 12)], tmp_path / "two.yaml")
    assert [len(ratios) for ratios in found["magcache"]["ratios"]] == [11, 11]
    with patch(pipe, cache=MagCache(constants=str(tmp_path / "two.yaml"), threshold=2.0)) as handle:
        run("wan", pipe, 12)
        assert handle.report().features[0]["hits"] > 0


def test_mistakes_are_told(tmp_path: Path) -> None:
    file = tmp_path / "flux.yaml"
    with patch(build("flux")) as handle:
        handle.calibrate([call_arguments("flux", 3)], file)
        for prompts in ([], "a red apple"):
            with pytest.raises(PatchError, match="a list of at least one prompt"):
                handle.calibrate(prompts)
        steps: list[Any] = []
        for files in ({"path": tmp_path / "no" / "flux.yaml"}, {"planned": tmp_path / "no" / "flux.safetensors"}):
            with pytest.raises(PatchError, match=r"calibrate cannot write .*No such file or directory"):
                handle.calibrate([{"callback_on_step_end": lambda *_: steps.append(1)}], **files)
        assert not steps, "told before anything runs"
        with pytest.raises(PatchError, match="at least 2 steps"):
            handle.calibrate([call_arguments("flux", 1)])
        with pytest.raises(PatchError, match="same number of steps"):
            handle.calibrate([call_arguments("flux", 3), call_arguments("flux", 4)])
    with patch(build("flux"), cache=Static(steps=(0,))) as handle:
        with pytest.raises(PatchError, match="computes every step, and static is on"):
            handle.calibrate([call_arguments("flux", 3)])
    with pytest.raises(PatchError, match=r"was measured on transformer FluxTransformer2DModel of 2\+3 blocks"):
        patch(build("flux", 4), cache=MagCache(constants=str(file)))
    with pytest.raises(PatchError, match=r"no file of constants .*nearest: flux\.yaml"):
        patch(build("flux"), cache=MagCache(constants=str(tmp_path / "fluxx.yaml")))
    file.write_text("[1, 2]")
    with pytest.raises(PatchError, match="holds no constants of magcache"):
        patch(build("flux"), cache=MagCache(constants=str(file)))


def test_calibrate_measures_computed_calls_only() -> None:
    """A call that another feature answers has added nothing to the trunk's input."""

    class Answers(Feature):
        name, order = "answers", Order.GUIDANCE

        def denoiser_in(self, call: Call) -> Any:
            return torch.zeros_like(call.input) if call.step.index == 0 else None

    with patch(build("wan"), features=(Answers(),)) as handle:
        found = handle.calibrate([call_arguments("wan", STEPS)])["magcache"]["ratios"]
    assert all(ratios[0] == 1.0 != ratios[1] for ratios in found), "the first ratio is of two computed steps"
