"""One rank reads the model and encodes the prompt; the others get both, and draw what one process draws."""

from __future__ import annotations

import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiny_text
import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from ranks import on_ranks
from torch import nn

from chitu_diffusion import Parallel, patch
from chitu_diffusion.parallel import share
from chitu_diffusion.parallel.prompt import Room, _mapped
from chitu_diffusion.parallel.share import load_once
from chitu_diffusion.runtime.errors import LoadError
from chitu_diffusion.runtime.loading import load_pipeline
from chitu_hooks import GenerationError, PatchError

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

NAMES = tuple(tiny_text.SIZES)
CALL = {"prompt": "a cat", "num_inference_steps": 2, "height": 16, "width": 16, "max_sequence_length": 16}


def arguments(name: str, **over: Any) -> dict[str, Any]:
    frames = {"num_frames": 5} if name == "wan" else {}
    generator = torch.Generator().manual_seed(0)
    return {**CALL, **frames, "generator": generator, "output_type": "latent", **over}


def drawn(pipe: Any, name: str, **over: Any) -> torch.Tensor:
    return pipe(**arguments(name, **over))[0]


class Reads:
    """How often the text encoders of a pipeline run."""

    def __init__(self, pipe: Any) -> None:
        self.count = 0
        for part, module in pipe.components.items():
            if part.startswith("text_encoder") and module is not None:
                module.register_forward_pre_hook(self.tick)

    def tick(self, *_: Any) -> None:
        self.count += 1


def encoded_once(name: str) -> Any:
    pipe = tiny_text.text(name)
    expected, reads = drawn(pipe, name), Reads(pipe)
    found: dict[str, Any] = {}
    for prompt in ("once", "each"):
        reads.count = 0
        with patch(pipe, parallel=Parallel(gather=2, prompt=prompt)) as handle:  # type: ignore[arg-type]
            got = drawn(pipe, name)
            report = {f["name"]: f for f in handle.report().features}
        found[prompt] = float((got - expected).abs().max()), reads.count, report.get("prompt once")
    return found, "encode_prompt" in vars(pipe)


def noise_after_a_drawing_encoder() -> float:
    """An encoder that draws from the global generator, before latents that are drawn from it too."""
    pipe = tiny_text.text("flux")

    def draws(*_: Any) -> None:
        torch.rand(3)

    torch.manual_seed(0)
    pipe.text_encoder.register_forward_hook(draws)
    expected = drawn(pipe, "flux", generator=None)
    torch.manual_seed(0)
    with patch(pipe, parallel=Parallel(gather=2)):
        got = drawn(pipe, "flux", generator=None)
    return float((got - expected).abs().max())


def noise_after_an_unusual_encoder() -> float:
    """One that draws from the generator of the call, and calls itself through the pipeline."""
    pipe = tiny_text.text("flux")
    stock, within = pipe.encode_prompt, []

    def encode(*args: Any, **kwargs: Any) -> Any:
        if not within:
            within.append(True)
            try:
                return pipe.encode_prompt(*args, **kwargs)
            finally:
                within.clear()
        torch.rand(3, generator=generator)
        return stock(*args, **kwargs)

    pipe.encode_prompt = encode
    generator = torch.Generator().manual_seed(0)
    expected = drawn(pipe, "flux", generator=generator)
    generator.manual_seed(0)
    with patch(pipe, parallel=Parallel(gather=2)):
        got = drawn(pipe, "flux", generator=generator)
    return float((got - expected).abs().max())


def encoder_that_fails() -> tuple[str, str]:
    pipe = tiny_text.text("flux")
    broken = pipe.text_encoder.register_forward_pre_hook(fail)
    with patch(pipe, parallel=Parallel(gather=2)):
        try:
            drawn(pipe, "flux")
            message = "nothing was raised"
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
        broken.remove()
        after = drawn(pipe, "flux")
    return message, "" if torch.isfinite(after).all() else "not finite"


def fail(*_: Any) -> None:
    raise ZeroDivisionError("no such word")


def read_once(rank: int, folder: str, name: str) -> Any:
    """Everything that the first rank's pipeline has, compared with what a rank that must not read has."""
    read = [0]

    def load() -> Any:
        read[0] += 1
        return load_pipeline(Path(folder), dtype=torch.bfloat16, device="cpu")

    pipe = load_once(load, "cpu", rank)
    reads = read[0]
    alone = load()
    same = {}
    for part, module in alone.components.items():
        if not isinstance(module, nn.Module):
            same[part] = type(getattr(pipe, part)) is type(module)
            continue
        mine = getattr(pipe, part)
        named = [
            (n, t) for m in (module, mine) for n, t in (*m.named_parameters(remove_duplicate=False), *m.named_buffers())
        ]
        half = len(named) // 2
        same[part] = all(
            a == b and t.dtype == u.dtype and t.requires_grad == u.requires_grad and torch.equal(t, u)
            for (a, t), (b, u) in zip(named[:half], named[half:])
        ) and len({id(t) for _, t in named[:half]}) == len({id(t) for _, t in named[half:]})
        same[f"{part} in eval mode"] = mine.training == module.training
    return reads, same, torch.equal(drawn(pipe, name), drawn(alone, name))


def load_that_fails(rank: int) -> str:
    def load() -> Any:
        raise LoadError("half downloaded")

    try:
        load_once(load, "cpu", rank)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def not_to_be_pickled(rank: int) -> tuple[int, bool]:
    read = [0]

    def load() -> Any:
        read[0] += 1
        pipe = tiny_text.text("flux")
        pipe.text_encoder.secret = lambda: None
        return pipe

    pipe = load_once(load, "cpu", rank)
    return read[0], torch.equal(drawn(pipe, "flux"), drawn(load(), "flux"))


def work(rank: int, folders: dict[str, str]) -> dict[str, Any]:
    share.PATIENCE = timedelta(seconds=60)  # a rank that fails here is not ended by a launcher
    found: dict[str, Any] = {name: encoded_once(name) for name in NAMES}
    found["noise"] = noise_after_a_drawing_encoder()
    found["unusual"] = noise_after_an_unusual_encoder()
    found["broken"] = encoder_that_fails()
    found["read"] = {name: read_once(rank, folder, name) for name, folder in folders.items()}
    found["load fails"] = load_that_fails(rank)
    found["lambda"] = not_to_be_pickled(rank)
    return found


@pytest.fixture(scope="module")
def pair() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        folders = {name: str(tiny_text.save(name, Path(folder) / name)) for name in NAMES}
        return on_ranks(work, 2, folders, timeout=60)


@pytest.mark.parametrize("name", NAMES)
def test_the_first_rank_encodes_for_all(pair: list[dict[str, Any]], name: str) -> None:
    for place, rank in enumerate(pair):
        found, left = rank[name]
        far, reads, told = found["once"]
        assert far < 1e-5 and not left
        calls = told["encoded here"] + told["received"]
        assert calls > 0 and told["received"] == (calls if place else 0)
        assert (reads > 0) == (place == 0), "the text encoders of the others do not run"
        far, reads, told = found["each"]
        assert far < 1e-5 and reads > 0 and told is None


def test_random_numbers_go_on_as_in_one_process(pair: list[dict[str, Any]]) -> None:
    for rank in pair:
        assert rank["noise"] < 1e-5
        assert rank["unusual"] < 1e-5


class Pair(NamedTuple):
    text: Any
    pooled: Any


def test_what_an_encoder_returns_keeps_its_form() -> None:
    one, two = torch.ones(2), torch.zeros(3)
    given = [None, Pair(one, (two, "word")), {"a": [one], 3: two}, Transformer2DModelOutput(sample=one)]
    form = _mapped(given, lambda value: Room(value.shape, value.dtype) if isinstance(value, torch.Tensor) else value)
    assert form[1] == Pair(Room(one.shape, one.dtype), (Room(two.shape, two.dtype), "word"))
    back = _mapped(form, lambda value: torch.full(value.shape, 7.0) if isinstance(value, Room) else value)
    assert back[0] is None and type(back[1]) is Pair and back[1].pooled[0].shape == (3,)
    assert (
        set(back[2]) == {"a", 3} and type(back[3]) is Transformer2DModelOutput and torch.equal(back[3].sample, 7 * one)
    )


def test_an_encoder_that_fails_ends_the_call_on_every_rank_and_the_next_works(pair: list[dict[str, Any]]) -> None:
    assert pair[0]["broken"] == ("ZeroDivisionError: no such word", "")
    message, after = pair[1]["broken"]
    assert message.startswith(GenerationError.__name__) and "rank 0 could not encode the prompt" in message
    assert message.endswith("ZeroDivisionError: no such word") and not after


@pytest.mark.parametrize("name", NAMES)
def test_one_rank_reads_the_weights(pair: list[dict[str, Any]], name: str) -> None:
    for place, rank in enumerate(pair):
        reads, same, picture = rank["read"][name]
        assert reads == (0 if place else 1)
        assert all(same.values()), [part for part, equal in same.items() if not equal]
        assert picture


def test_a_model_that_cannot_be_loaded_is_told_by_every_rank(pair: list[dict[str, Any]]) -> None:
    for rank in pair:
        assert rank["load fails"] == "LoadError: half downloaded"


def test_what_cannot_be_pickled_is_loaded_by_every_rank(pair: list[dict[str, Any]]) -> None:
    for rank in pair:
        assert rank["lambda"] == (1, True)


def test_words_that_are_not_known() -> None:
    with pytest.raises(PatchError, match="unknown prompt='all'"):
        Parallel(prompt="all")  # type: ignore[arg-type]
