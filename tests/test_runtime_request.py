"""`DiffusionTask`, `Shape` and the plan of a call: every option is placed by name or refused by name."""

from __future__ import annotations

import json
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import tiny

from chitu_diffusion.demo import DEFAULTS
from chitu_diffusion.runtime import DiffusionTask, RequestError, plan_call, shape_of
from chitu_diffusion.runtime.task import option
from chitu_hooks import ChituError


def task(**over: Any) -> DiffusionTask:
    return DiffusionTask(**{"prompts": ("a cat",), **over})


FULL = dict(
    prompts=("a", "b"), model="m", hook_map="h", negative_prompt="n", steps=3, guidance=2.5, height=8, width=16,
    num_images=2, num_frames=5, fps=8.0, seed=11, image="i", mask="k", arguments={"eta": 0.5}, dtype="float16",
    device="cpu", require_gpu=True, attention="sdpa_math", cache="static", cache_args={"steps": "0,1"}, nproc=4,
    cfg_parallel=2, ulysses=2, ring=1, gather=1, overlap=1, encode_prompt="each", output="o",
)  # fmt: skip


def test_a_task_survives_json_and_hides_nothing() -> None:
    assert set(FULL) == {field.name for field in fields(DiffusionTask)}, "keep this list whole"
    made = DiffusionTask(**FULL)
    data = json.loads(json.dumps(made.to_json()))
    assert set(data) == set(FULL)
    assert DiffusionTask.from_json(data) == made


def test_an_unknown_field_is_named() -> None:
    with pytest.raises(RequestError, match="'stepz'; nearest: steps"):
        DiffusionTask.from_json({"prompts": ["a"], "stepz": 3})


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"prompts": ()}, "--prompt"),
        ({"steps": 0}, "--steps 0"),
        ({"steps": -3}, "--steps -3"),
        ({"height": -16}, "--height -16"),
        ({"num_images": 0}, "--num-images 0"),
        ({"num_frames": 0}, "--num-frames 0"),
        ({"fps": 0.0}, "--fps 0"),
        ({"guidance": -1.0}, "--guidance -1"),
        ({"guidance": float("nan")}, "--guidance nan"),
        ({"seed": -1}, "--seed -1"),
        ({"cache_args": {"steps": "0"}}, "--cache-arg steps"),
    ],
)
def test_impossible_values(over: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        task(**over)


def test_defaults_fill_what_is_open_and_nothing_else() -> None:
    filled = task(steps=3, negative_prompt="ugly", arguments={"max_sequence_length": 7}).filled(DEFAULTS)
    assert (filled.steps, filled.negative_prompt, filled.arguments["max_sequence_length"]) == (3, "ugly", 7)
    assert (filled.guidance, filled.height) == (DEFAULTS["guidance"], DEFAULTS["height"])
    assert task().filled(DEFAULTS).arguments == DEFAULTS["arguments"]


# -- shapes ------------------------------------------------------------------------------------------------------------


def fake(**parts: Any) -> Any:
    return SimpleNamespace(**parts)


def config(**values: Any) -> Any:
    return SimpleNamespace(config=SimpleNamespace(**values))


FLUX = fake(
    vae_scale_factor=8,
    default_sample_size=128,
    transformer=config(patch_size=1),
    image_processor=config(vae_scale_factor=16),
)
WAN = fake(
    vae_scale_factor_spatial=8,
    vae_scale_factor_temporal=4,
    transformer=config(patch_size=(1, 2, 2)),
    video_processor=config(vae_scale_factor=8),
)
SD3 = fake(
    vae_scale_factor=8, transformer=config(patch_size=2, sample_size=128), image_processor=config(vae_scale_factor=8)
)
SDXL = fake(vae_scale_factor=8, unet=config(sample_size=128), image_processor=config(vae_scale_factor=8))


def test_sizes_of_the_published_pipelines() -> None:
    still = {"height": None, "width": None, "max_sequence_length": 512}
    flux = shape_of(FLUX, {"height": 768}, still)
    assert (flux.height, flux.width, flux.latent, flux.tokens, flux.text) == (768, 1024, (96, 128), 48 * 64, 512)
    wan = shape_of(WAN, {}, {"height": 480, "width": 832, "num_frames": 81})
    assert (wan.latent, wan.tokens, wan.frames) == ((21, 60, 104), 21 * 30 * 52, 81)
    sd3 = shape_of(SD3, {}, still)
    assert (sd3.multiple, sd3.tokens) == (16, 64 * 64)
    sdxl = shape_of(SDXL, {}, still)
    assert (sdxl.multiple, sdxl.latent, sdxl.tokens) == (8, (128, 128), None)


@pytest.mark.parametrize(
    ("pipe", "arguments", "message"),
    [
        (FLUX, {"height": 1000}, "--height 1000 does not fit .* multiple of 16 pixels; nearest: 992 or 1008"),
        (FLUX, {"width": 7}, "--width 7 .*nearest: 16$"),
        (WAN, {"num_frames": 80}, "--num-frames 80 .* 1 more than a multiple of 4; nearest: 77 or 81"),
        (WAN, {"num_frames": 2}, "nearest: 1 or 5"),
    ],
)
def test_sizes_that_do_not_fit(pipe: Any, arguments: dict[str, Any], message: str) -> None:
    defaults = {"height": None, "width": None} | ({"num_frames": 81} if pipe is WAN else {})
    with pytest.raises(RequestError, match=message):
        shape_of(pipe, arguments, defaults)


@pytest.mark.parametrize("name", tiny.TINY)
def test_tokens_are_what_the_blocks_get(name: str) -> None:
    pipe = tiny.build(name)
    kwargs = tiny.call_arguments(name, steps=1)
    shape = shape_of(pipe, kwargs, {"num_frames": None} if "num_frames" in kwargs else {})
    lengths = set()
    for module in pipe.transformer.modules():
        if hasattr(module, "processor") or hasattr(module, "attn"):
            module.register_forward_pre_hook(
                lambda m, args, kw: lengths.update(
                    t.shape[1] for t in (*args, *kw.values()) if getattr(t, "ndim", 0) == 3
                ),
                with_kwargs=True,
            )
    pipe(**kwargs)
    assert lengths
    if (
        name == "lumina2"
    ):  # the pipeline counts with a VAE factor of 8, whatever the VAE: so do we, and so must the blocks
        assert shape.latent == (8, 8)
    assert any(length in (shape.tokens, shape.tokens + 6, shape.tokens + 32) for length in lengths), (shape, lengths)


# -- placing options ---------------------------------------------------------------------------------------------------


def test_guidance_is_true_cfg_where_the_pipeline_has_it() -> None:
    plan = plan_call(tiny.build("flux"), task(guidance=3.0, steps=2), {})
    assert plan.placed == {"steps": "num_inference_steps", "guidance": "true_cfg_scale"}
    assert plan.arguments["true_cfg_scale"] == 3.0
    assert plan.filled_in["negative_prompt"] == "", "without one the pipeline would ignore the scale"
    assert plan.arguments["negative_prompt"] == ""


def test_guidance_is_guidance_scale_elsewhere() -> None:
    plan = plan_call(tiny.build("sd3"), task(guidance=3.0), {})
    assert plan.placed == {"guidance": "guidance_scale"} and "negative_prompt" not in plan.arguments


def test_every_option_has_its_place() -> None:
    pipe = tiny.build("wan")
    given = dict(
        steps=2, guidance=3.0, negative_prompt="bad", height=16, width=16, num_images=2, num_frames=5, fps=8.0,
        arguments={"max_sequence_length": 32},
    )  # fmt: skip
    plan = plan_call(pipe, task(**given), {})
    assert plan.fps == 8.0
    assert plan.arguments == {
        "num_inference_steps": 2, "guidance_scale": 3.0, "negative_prompt": "bad", "height": 16, "width": 16,
        "num_videos_per_prompt": 2, "num_frames": 5, "max_sequence_length": 32, "output_type": "pil",
    }  # fmt: skip


def test_the_frame_rate_is_told_to_a_pipeline_that_asks_for_it() -> None:
    pipe = tiny.build("ltx")
    assert plan_call(pipe, task(fps=12.0), {}).arguments["frame_rate"] == 12
    assert plan_call(pipe, task(), {}).fps == 25
    assert plan_call(pipe, task(arguments={"frame_rate": 9}), {}).fps == 9
    with pytest.raises(RequestError, match="same thing"):
        plan_call(pipe, task(fps=12.0, arguments={"frame_rate": 9}), {})


@pytest.mark.parametrize(
    ("name", "over", "message"),
    [
        ("flux", {"num_frames": 5}, "--num-frames has no meaning for FluxPipeline, which has no num_frames; "),
        ("flux", {"fps": 5.0}, "--fps has no meaning for FluxPipeline"),
        (
            "hunyuan_image",
            {"guidance": 2.0},
            "--guidance has no meaning for HunyuanImagePipeline.*nearest: distilled_guidance",
        ),
        ("flux", {"arguments": {"max_sequence_lenght": 5}}, "no such argument; nearest: max_sequence_length"),
        ("flux", {"arguments": {"height": 5}}, "use --height"),
        ("flux", {"arguments": {"num_inference_steps": 5}}, "use --steps"),
        ("flux", {"arguments": {"output_type": "latent"}}, "cannot be given from a shell"),
        ("flux", {"arguments": {"prompt_embeds": 5}}, "cannot be given from a shell"),
        ("flux", {"arguments": {"callback_on_step_end": "f"}}, "cannot be given from a shell"),
        ("flux", {"arguments": {"max_sequence_length": "many"}}, "takes a whole number there"),
        ("flux", {"arguments": {"max_sequence_length": 2.5}}, "takes a whole number there"),
        ("pixart", {"arguments": {"clean_caption": 1}}, "takes true or false"),
        ("flux", {"arguments": {"guidance_scale": 3.0}}, "has no effect"),
        ("flux", {"negative_prompt": "bad"}, "--negative-prompt has no effect at true_cfg_scale 1.0"),
        ("sd3", {"negative_prompt": "bad", "guidance": 1.0}, "--negative-prompt has no effect"),
        ("flux", {"height": 15}, "--height 15 does not fit FluxPipeline"),
    ],
)
def test_what_has_no_place_is_refused_by_name(name: str, over: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        plan_call(tiny.build(name), task(**over), {})


@pytest.mark.parametrize("field", ["image", "mask"])
def test_pictures_go_only_where_they_are_taken(field: str) -> None:
    with pytest.raises(RequestError, match=f"{option(field)} has no meaning for FluxPipeline"):
        plan_call(tiny.build("flux"), task(), {field: object()})


def test_a_pipeline_that_starts_from_a_picture_asks_for_it() -> None:
    import diffusers

    inpaint = diffusers.FluxInpaintPipeline(**tiny.build("flux").components)
    with pytest.raises(RequestError, match="--image"):
        plan_call(inpaint, task(), {})
    with pytest.raises(RequestError, match="--mask"):
        plan_call(inpaint, task(), {"image": object()})
    plan = plan_call(inpaint, task(), {"image": 1, "mask": 2})
    assert plan.placed == {"image": "image", "mask": "mask_image"}


def test_how_ranks_work_goes_to_parallel() -> None:
    from chitu_diffusion.runtime.generator import choose

    made = choose(task(ulysses=2, overlap=3, encode_prompt="each"))["parallel"]
    assert (made.ulysses, made.overlap, made.prompt) == (2, 3, "each")
    left = choose(task(ulysses=2))["parallel"]
    assert (left.overlap, left.prompt) == ("auto", "once")
    with pytest.raises(RequestError, match="--encode-prompt each is about several ranks; say how many"):
        task(nproc=2, encode_prompt="each")
    with pytest.raises(RequestError, match="--overlap 2 is about several ranks; say how many"):
        task(gather=1, overlap=2)
    with pytest.raises(ChituError, match="unknown prompt='eech'; nearest: each"):
        choose(task(ulysses=2, encode_prompt="eech"))
