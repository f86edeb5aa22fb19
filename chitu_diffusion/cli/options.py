"""The options that several subcommands share, and how words on the command line become values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from .group import UserError

PICTURE = "What to draw"
MODEL = "Which model, where"
FEATURES = "Hooks"
RANKS = "Several GPUs, one picture"
FILES = "Output"


def _option(panel: str, name: str, text: str, metavar: str | None = None) -> Any:
    return typer.Option(name, help=text, rich_help_panel=panel, metavar=metavar, show_default=False)


Prompt = Annotated[str | None, _option(PICTURE, "--prompt", "What to draw.", "TEXT")]
Prompts = Annotated[str | None, _option(PICTURE, "--prompts", "Text file of prompts, one a line.", "FILE")]
NegativePrompt = Annotated[
    str | None, _option(PICTURE, "--negative-prompt", "What not to draw; acts through guidance.", "TEXT")
]
Steps = Annotated[int | None, _option(PICTURE, "--steps", "Scheduler steps.", "N")]
Guidance = Annotated[
    float | None,
    _option(
        PICTURE,
        "--guidance",
        "Scale of guidance. True classifier-free guidance where the pipeline has it (`true_cfg_scale`), else its "
        "`guidance_scale`; request.json says which it was.",
        "SCALE",
    ),
]
Height = Annotated[int | None, _option(PICTURE, "--height", "Height in pixels.", "PIXELS")]
Width = Annotated[int | None, _option(PICTURE, "--width", "Width in pixels.", "PIXELS")]
Seed = Annotated[int, _option(PICTURE, "--seed", "Seed that every prompt starts from; 0 if left out.", "N")]
Image = Annotated[
    str | None, _option(PICTURE, "--image", "Picture to start from, for pipelines that take one.", "FILE")
]
Mask = Annotated[str | None, _option(PICTURE, "--mask", "Mask for inpainting: white is drawn anew.", "FILE")]
NumFrames = Annotated[int | None, _option(PICTURE, "--num-frames", "Frames of a clip, for video pipelines.", "N")]
Set = Annotated[
    list[str] | None,
    _option(
        PICTURE,
        "--set",
        "Any other argument of the pipeline's call, by its own name; the value is read as JSON or YAML. Repeatable.",
        "KEY=VALUE",
    ),
]
Model = Annotated[
    str | None,
    _option(
        MODEL, "--model", "Folder or Hub id of a diffusers pipeline; the embedded model if left out.", "PATH_OR_ID"
    ),
]
HookMapFile = Annotated[
    str | None,
    _option(MODEL, "--hook-map", "Hook map file; the registry's or an inferred map if left out.", "FILE"),
]
Dtype = Annotated[
    str,
    _option(
        MODEL, "--dtype", "float32, bfloat16 or float16; auto is bfloat16 on a GPU and float32 elsewhere.", "DTYPE"
    ),
]
Device = Annotated[
    str, _option(MODEL, "--device", "cpu, cuda, cuda:1, mps; auto is the first GPU, else cpu.", "DEVICE")
]
RequireGpu = Annotated[bool, _option(MODEL, "--require-gpu", "Fail where there is no GPU, rather than use the CPU.")]
Attention = Annotated[
    str | None,
    _option(
        FEATURES, "--attention", "Attention kernel by name, see chitu env; the pipeline's own if left out.", "NAME"
    ),
]
Cache = Annotated[
    str | None,
    _option(FEATURES, "--cache", "Feature cache by name, such as static; every step is computed if left out.", "NAME"),
]
CacheArg = Annotated[
    list[str] | None,
    _option(FEATURES, "--cache-arg", "Parameter of the cache, such as steps=0,1,2,4,8. Repeatable.", "KEY=VALUE"),
]


Nproc = Annotated[
    int | None,
    _option(RANKS, "--nproc", "Processes to start on this machine, one a GPU; by the degrees if left out.", "N"),
]
CfgParallel = Annotated[
    int | None, _option(RANKS, "--cfg-parallel", "Ranks over which the branches of guidance are divided.", "N")
]
Ulysses = Annotated[
    int | None, _option(RANKS, "--ulysses", "Ranks over which tokens are divided; attention exchanges heads.", "N")
]
Ring = Annotated[
    int | None,
    _option(RANKS, "--ring", "Ranks over which tokens are divided; keys and values go round.", "N"),
]
Gather = Annotated[
    int | None,
    _option(RANKS, "--gather", "Ranks over which tokens are divided; attention gathers keys and values.", "N"),
]
Overlap = Annotated[
    int | None,
    _option(RANKS, "--overlap", "Head groups exchanged one beside another's attention; by size if left out.", "N"),
]
EncodePrompt = Annotated[
    str | None,
    _option(RANKS, "--encode-prompt", "once, by one rank for all (the default), or each, by every rank.", "WHERE"),
]


def pairs(option: str, entries: list[str] | None) -> dict[str, str]:
    """``KEY=VALUE`` words as a mapping.

    Raises:
        UserError: an entry has no ``=`` or no key, or a key comes twice.
    """
    found: dict[str, str] = {}
    for entry in entries or ():
        key, equals, value = entry.partition("=")
        key = key.strip()
        if not equals or not key:
            raise UserError(f"{option} {entry!r} is not KEY=VALUE")
        if key in found:
            raise UserError(f"{option} {key} is given twice, as {found[key]!r} and as {value!r}")
        found[key] = value
    return found


def scalars(option: str, entries: list[str] | None) -> dict[str, Any]:
    """``KEY=VALUE`` words with each value read as JSON, else as YAML.

    Raises:
        UserError: not ``KEY=VALUE``, or the value is neither plain nor a list of plain values.
    """
    return {key: _scalar(option, key, value) for key, value in pairs(option, entries).items()}


def _scalar(option: str, key: str, text: str) -> Any:
    import yaml

    try:
        value = json.loads(text)
    except ValueError:
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            raise UserError(f"{option} {key}={text}: the value is neither JSON nor YAML; put text in quotes") from None
    plain = value if isinstance(value, list) else [value]
    if not all(item is None or isinstance(item, (bool, int, float, str)) for item in plain):
        raise UserError(
            f"{option} {key}={text}: the value is to be a number, a word, true, false, null or a list of those"
        )
    return value


def read_prompts(prompt: str | None, file: str | None) -> tuple[str, ...]:
    """The prompts of ``--prompt`` and of the lines of ``--prompts``; empty lines are left out.

    Raises:
        UserError: the file is not there, not UTF-8 text, or empty.
    """
    found = [prompt] if prompt is not None else []
    if file is not None:
        path = Path(file)
        if not path.is_file():
            raise UserError(f"--prompts {file!r}: no such file")
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (UnicodeDecodeError, OSError):
            raise UserError(f"--prompts {file!r} is not UTF-8 text") from None
        if "\0" in text:
            raise UserError(f"--prompts {file!r} is not text")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if not lines:
            raise UserError(f"--prompts {file!r} is empty; it is to hold one prompt a line")
        found += lines
    return tuple(found)


def at_least_1(numbers: Mapping[str, int | None]) -> None:
    """Check numbers of things, by option; those that were not given are None.

    Raises:
        UserError: one is less than 1.
    """
    for option, value in numbers.items():
        if value is not None and value < 1:
            raise UserError(f"{option} {value} is not possible; it is at least 1")


def need_diffusers() -> None:
    """Import diffusers, and quieten what is not for a user of the command.

    Raises:
        UserError: its import fails, which is a broken environment and no bug here.
    """
    try:
        import diffusers
        import transformers
    except Exception as error:
        raise UserError(f"import diffusers fails ({_last_line(error)}); chitu env tells more") from error
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__
