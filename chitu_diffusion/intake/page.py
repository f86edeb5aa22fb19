"""The reference page of a family: facts that could be read, each with its source, and a line for what could not."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .check import Check
from .inspection import Inspection
from .source import place_in_file
from .upstream import clone_facts

DEFAULTS = (
    "height", "width", "num_frames", "num_inference_steps", "guidance_scale", "true_cfg_scale", "max_sequence_length",
    "frame_rate", "fps",
)  # fmt: skip
"""Arguments of a pipeline's call whose defaults stand on the page."""
SHAPE = re.compile(
    r"^(num_(?!train)\w*(layers|blocks|heads)|n_(layers|heads|kv_heads|refiner_layers)|depth|attention_head_dim|hidden_size|dim|"
    r"inner_dim|(in|out)_channels|patch_size\w*|\w*(cross_attention|joint_attention|caption|text|pooled)\w*_(dim|channels)|"
    r"caption_channels|axes_dim\w*|guidance_embeds)$"
)
"""Entries of a denoiser's configuration that a hook map or a feature depends on."""
CARD_KEYS = ("license", "license_name", "license_link", "base_model", "pipeline_tag")


@dataclass(frozen=True)
class Fact:
    """One row of a table."""

    what: str
    value: str
    source: str


def page(found: Inspection, folder: Path, checks: list[Check] | None) -> str:
    """The text of ``refs/<name>/README.md``.

    Args:
        found: the pipeline, looked at.
        folder: where the page will stand; what `chitu intake` left there is read.
        checks: what was checked of the map with a call; None if it was not called.
    """
    name, pipeline = found.hook_map.name, type(found.target.pipe).__name__
    parts = [
        f"# {pipeline.removesuffix('Pipeline')}",
        f"Hook map: [`adapters/{name}.py`](../../adapters/{name}.py).\n"
        f"Read from diffusers {found.gap.diffusers} as installed; what nobody has read yet says so.",
        "## Upstream",
        _table(_upstream(found, folder), f"official repository: `chitu intake {name} --upstream URL` records it"),
        "## Checkpoints",
        _table(_checkpoints(found), "model card and weights: name the repository and its licence"),
        "## Defaults",
        _table(_defaults(found), "the pipeline's call has none of the usual arguments"),
        "## Shape",
        _table(_shape(found), "no configuration could be read"),
        "## Gap report",
        _gap(found, checks),
    ]
    return "\n\n".join(parts) + "\n"


def _upstream(found: Inspection, folder: Path) -> Iterator[Fact]:
    yield from (Fact(what, value, source) for what, value, source in clone_facts(folder / "upstream"))
    demo = folder / "demo.json"
    if demo.is_file():
        data = json.loads(demo.read_text(encoding="utf-8"))
        yield Fact("demo", f"`{data['command']}`, {data['seconds']} s on {data['device']}", "`demo.json`, run here")


def _checkpoints(found: Inspection) -> Iterator[Fact]:
    target = found.target
    pipeline = type(target.pipe).__name__
    if target.kind == "id":
        yield Fact("repository", f"<https://huggingface.co/{target.word}>", "given")
    yield Fact("diffusers pipeline", f"`{pipeline}`", f"`{place_in_file(type(target.pipe))}`")
    for key, value in _card(target.folder).items():
        yield Fact(key.replace("_", " "), value, "front matter of the model card")
    module = sys.modules.get(type(target.pipe).__module__)
    example = str(getattr(module, "EXAMPLE_DOC_STRING", ""))
    for repository in dict.fromkeys(re.findall(r"""from_pretrained\(\s*["']([\w.-]+/[\w.-]+)["']""", example)):
        link = f"[{repository}](https://huggingface.co/{repository})"
        yield Fact(
            "example of diffusers loads",
            link,
            f"`EXAMPLE_DOC_STRING` in `{place_in_file(type(target.pipe)).partition(':')[0]}`",
        )
    siblings = _siblings(found)
    if siblings:
        names = ", ".join(f"`{name}`" for name in siblings)
        yield Fact("the same denoiser class", names, "annotations of diffusers; add them to the map when verified")


def _card(folder: Path | None) -> dict[str, str]:
    """What the front matter of a model card says."""
    import yaml

    card = folder / "README.md" if folder is not None else None
    if card is None or not card.is_file():
        return {}
    match = re.match(r"---\n(.*?)\n---", card.read_text(encoding="utf-8", errors="replace"), flags=re.S)
    try:
        data = yaml.safe_load(match.group(1)) if match else None
    except yaml.YAMLError:
        data = None
    return {key: str(data[key]) for key in CARD_KEYS if isinstance(data, dict) and data.get(key)}


def _siblings(found: Inspection) -> list[str]:
    """Pipelines of the same folder of diffusers that are annotated with the same denoiser class."""
    import diffusers

    from .skeleton import annotated_classes

    cls = type(found.target.pipe)
    own = {type(denoiser.inner) for denoiser in found.sites.denoisers}
    package = sys.modules.get(cls.__module__.rpartition(".")[0])
    if not cls.__module__.startswith("diffusers.pipelines."):
        return []
    names = sorted(name for name in dir(package) if name.endswith("Pipeline") and name != cls.__name__)
    siblings = [getattr(package, name) for name in names if hasattr(diffusers, name)]
    return [
        c.__name__ for c in siblings if isinstance(c, type) and own & set(annotated_classes(c).values())
    ]  # fmt: skip


def _defaults(found: Inspection) -> Iterator[Fact]:
    cls = type(found.target.pipe)
    parameters = inspect.signature(cls.__call__).parameters
    for name in DEFAULTS:
        if name in parameters:
            value = parameters[name].default
            shown = (
                "computed by the pipeline"
                if value is None
                else "none"
                if value is inspect.Parameter.empty
                else str(value)
            )
            yield Fact(f"`{name}`", shown, f"`{place_in_file(inspect.unwrap(cls.__call__))}`")


def _shape(found: Inspection) -> Iterator[Fact]:
    """Stacks and configuration of each denoiser; of a Python file the class's defaults, since what it builds is small."""
    target = found.target
    defaults = target.kind in ("class", "file")
    for denoiser in found.sites.denoisers:
        cls = type(denoiser.inner)
        source = f"defaults of `{cls.__name__}`" if defaults else f"`{denoiser.name}/config.json`"
        for stack in denoiser.stacks:
            number = f"{len(stack.blocks)} × " if target.kind != "file" else ""
            yield Fact(f"`{denoiser.name}.{stack.path}`", f"{number}`{type(stack.blocks[0].module).__name__}`", source)
        config = _class_defaults(cls) if defaults else dict(getattr(denoiser.inner, "config", {}))
        for key, value in config.items():
            if SHAPE.match(key) and value is not None:
                yield Fact(f"`{denoiser.name}.config.{key}`", str(value), source)
        heads = next((config[key] for key in ("num_attention_heads", "num_heads", "n_heads") if key in config), None)
        if isinstance(heads, int) and heads > 0:
            fits = ", ".join(str(n) for n in range(2, heads + 1) if heads % n == 0)
            yield Fact("ranks that divide the heads", fits, f"{heads} heads")
    scheduler = getattr(target.pipe, "scheduler", None)
    if scheduler is not None:
        where = "annotation of the pipeline" if defaults else "`scheduler/scheduler_config.json`"
        yield Fact("scheduler", f"`{type(scheduler).__name__}`", where)


def _class_defaults(cls: type) -> dict[str, Any]:
    parameters = inspect.signature(inspect.getattr_static(cls, "__init__")).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def _gap(found: Inspection, checks: list[Check] | None) -> str:
    parts = [f"{found.gap.not_covered} lines of code are not covered: [gap.md](gap.md)."]
    if checks is None:
        parts.append("The map was read from source and configuration; no call was made with it.")
    else:
        parts.append(_list("Checked by a small call:", [str(check) for check in checks]))
    if found.draft is not None:
        parts.append(_list("How the map is known:", found.draft.evidence))
        questions = found.draft.questions
        unchecked = "not checked: whether upstream and diffusers agree numerically on one seed and one schedule"
        parts.append(_list("Open:", [*questions, unchecked]))
    return "\n\n".join(parts)


def _list(title: str, lines: Sequence[str]) -> str:
    return "\n".join([title, "", *(f"- {line}" for line in lines)])


def _table(facts: Iterator[Fact], otherwise: str) -> str:
    rows = [f"| {fact.what} | {fact.value} | {fact.source} |" for fact in facts]
    if not rows:
        return f"Not read yet: {otherwise}."
    return "\n".join(["| what | value | source |", "|---|---|---|", *rows])
