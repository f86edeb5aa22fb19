"""Hook maps: what cannot be seen from outside a pipeline, as data.

A hook map is a Python file with one public name::

    from chitu_hooks import HookMap, Stack

    HOOK_MAP = HookMap(
        name="flux",
        pipelines=("FluxPipeline",),
        stacks=(Stack("transformer_blocks", streams={"image": "hidden_states", ...}, returns=("text", "image")),),
    )
"""

from __future__ import annotations

import re
import runpy
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from .errors import HookMapError, nearest

ROLES = ("image", "text", "joint")
"""*image* and *text*: tokens of one kind. *joint*: both in one tensor."""
EXIT_ROLES = ("", "image", "joint")
GUIDANCE = ("batched", "sequential", "embedded", "unknown")
ALIGNED = re.compile(r"(image|text|joint)(?:@(\d)(?::(\d))?)?")
"""Form of a value of `Stack.aligned`."""


@dataclass(frozen=True)
class Stack:
    """One ModuleList of blocks of a denoiser.

    Raises:
        HookMapError: `returns` names a role that `streams` does not have.
    """

    path: str
    """Dotted path of the ModuleList below the denoiser."""
    streams: Mapping[str, str]
    """Role (`image`, `text`, `joint`) -> name of the block's argument that carries it, shaped (B, S, C)."""
    returns: tuple[str, ...]
    """Roles in the order in which a block returns them; a single role means a bare tensor."""
    order: tuple[str, ...] = ("text", "image")
    """Token order inside joint attention and inside a joint stream; empty where it is not known."""
    refiner: bool = False
    """True for blocks that run before the trunk on part of the tokens (noise and context refiners)."""
    aligned: Mapping[str, str] | None = None
    """Further block arguments with one entry a token -> which tokens, so that they can be cut as the streams are.

    A key is an argument, or an item of one (``image_rotary_emb.0``). A value is a role, with ``@`` and the token
    dimension where the size does not tell which it is (``joint@0``), and with ``:`` and the number of dimensions where
    the argument has tokens only in that form (``image@1:4``). None: not known, so nothing can be cut.
    """

    def __post_init__(self) -> None:
        _check_tuples(f"stack {self.path!r}", returns=self.returns, order=self.order)
        for key, value in (self.aligned or {}).items():
            if not ALIGNED.fullmatch(value):
                raise HookMapError(
                    f"stack {self.path!r}: aligned[{key!r}] is {value!r}; it is to be image, text or joint, as in 'joint@0'"
                )
        for role in self.returns:
            if role not in self.streams:
                raise HookMapError(
                    f"stack {self.path!r} returns {role!r}, which is not among its streams {list(self.streams)}"
                )
        for role in self.streams:
            if role not in ROLES:
                raise HookMapError(f"stack {self.path!r} has a stream {role!r}{nearest(role, ROLES)}")


@dataclass(frozen=True)
class HookMap:
    """Where the seams of one pipeline family are."""

    name: str
    """The family, as in the file name of the adapter."""
    pipelines: tuple[str, ...]
    """Class names of the pipelines this map is for; subclasses are covered."""
    denoisers: tuple[str, ...] = ("transformer",)
    """Attributes of the pipeline that hold a denoiser; one that is None on a pipeline is left out."""
    stacks: tuple[Stack, ...] | None = None
    """Stacks in the order in which they run, or None to infer them; an empty tuple says that there is no trunk."""
    conditioning: tuple[str, ...] = ("encoder_hidden_states",)
    """Denoiser arguments that differ between the branches of guidance and stay the same from step to step."""
    guidance: Literal["batched", "sequential", "embedded", "unknown"] = "unknown"
    """How the pipeline runs classifier-free guidance: both branches in one batch, one after the other, or not at all."""
    exit: str = ""
    """Dotted path of the module whose first argument is the trunk's output (the output norm); empty: the last block's
    output. Needed where the model adds something, or leaves blocks out, after the last block called."""
    exit_role: Literal["", "image", "joint"] = ""
    """What `exit` takes, where that is not the main stream of the last stack: "image" if the text was cut off before."""
    trunk_arguments: tuple[str, ...] = ()
    """Denoiser arguments that are added to the image or the joint stream between blocks: lists or dicts of (B, S, C)."""
    source: Literal["explicit", "registry", "inferred"] = field(default="explicit", compare=False)
    """How this map came to be used; set by `find`."""

    @property
    def learns(self) -> bool:
        """Whether streams of some stack are left to the first computed call: in every inferred map, and in others in part."""
        return any(not stack.returns for stack in self.stacks or ())

    def __post_init__(self) -> None:
        name = f"hook map {self.name!r}"
        _check_tuples(
            name,
            pipelines=self.pipelines,
            denoisers=self.denoisers,
            conditioning=self.conditioning,
            trunk_arguments=self.trunk_arguments,
        )
        if self.guidance not in GUIDANCE:
            raise HookMapError(f"{name}: guidance is {self.guidance!r}{nearest(str(self.guidance), GUIDANCE)}")
        if self.exit_role not in EXIT_ROLES:
            raise HookMapError(f"{name}: exit_role is {self.exit_role!r}{nearest(str(self.exit_role), EXIT_ROLES[1:])}")
        paths = [stack.path for stack in self.stacks or ()]
        twice = next((path for path in paths if paths.count(path) > 1), None)
        if twice is not None:
            raise HookMapError(f"{name} has the stack {twice!r} {paths.count(twice)} times; name it once")


def _check_tuples(where: str, **fields: Any) -> None:
    """Raise where somebody wrote ``("image")``, which is a word and would be read letter by letter."""
    for name, value in fields.items():
        if isinstance(value, str):
            raise HookMapError(f"{where}: {name} is the word {value!r}; write a tuple, ({value!r},)")


def load_hook_map(path: str | Path) -> HookMap:
    """Read the hook map file `path`.

    Raises:
        HookMapError: no such file, it does not run, or it has no `HOOK_MAP`.
    """
    path = Path(path)
    if not path.is_file():
        siblings = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise HookMapError(f"no hook map file {str(path)!r}{nearest(path.name, siblings)}")
    try:
        names = runpy.run_path(str(path))
    except (Exception, SystemExit) as error:  # the file is the user's: whatever it raises is told in one sentence
        raise HookMapError(
            f"hook map {str(path)!r} does not run: {type(error).__name__}: {error}{_nearest_field(error)}"
        ) from error
    found = names.get("HOOK_MAP")
    if not isinstance(found, HookMap):
        raise HookMapError(f"hook map {str(path)!r} has no HOOK_MAP of type chitu_hooks.HookMap")
    return found


def _nearest_field(error: BaseException) -> str:
    """The fields like the one that `HookMap` or `Stack` did not expect, if that is the error."""
    found = re.fullmatch(r"(HookMap|Stack)\.__init__\(\) got an unexpected keyword argument '(\w+)'.*", str(error))
    if not isinstance(error, TypeError) or found is None:
        return ""
    cls = HookMap if found[1] == "HookMap" else Stack
    return nearest(found[2], [one.name for one in fields(cls)])
