"""`DiffusionTask`: every option of one request, as plain data, and nothing else."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from chitu_hooks.errors import nearest

from .errors import RequestError

DEGREES = ("cfg_parallel", "ulysses", "ring", "gather")


@dataclass(frozen=True, kw_only=True)
class DiffusionTask:
    """What was asked for. None means that it was left open: the embedded model's or the pipeline's default holds.

    Raises:
        RequestError: a value is impossible for every pipeline.
    """

    prompts: tuple[str, ...]
    """One pipeline call each."""
    model: str | None = None
    """Folder or id of a diffusers pipeline; None is the embedded model."""
    hook_map: str | None = None
    """Path of a hook map file; None takes the registry's or an inferred one."""
    negative_prompt: str | None = None
    steps: int | None = None
    """Scheduler steps."""
    guidance: float | None = None
    """Scale of classifier-free guidance: `true_cfg_scale` where the pipeline has it, else `guidance_scale`."""
    height: int | None = None
    """Pixels."""
    width: int | None = None
    """Pixels."""
    num_images: int | None = None
    """Pictures or clips per prompt."""
    num_frames: int | None = None
    fps: float | None = None
    """Frames per second of the clip that is written."""
    seed: int = 0
    """Every prompt starts from this seed, so that each can be drawn again by itself."""
    image: str | None = None
    """Path of an input picture."""
    mask: str | None = None
    """Path of a mask: white is drawn anew."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the pipeline's call, by name."""
    dtype: str = "auto"
    """float32, bfloat16 or float16; auto is bfloat16 on a GPU and float32 elsewhere."""
    device: str = "auto"
    """auto is the first GPU if there is one."""
    require_gpu: bool = False
    attention: str | None = None
    """Attention kernel; None leaves the pipeline's own."""
    cache: str | None = None
    """Feature cache; None is none."""
    cache_args: Mapping[str, str] = field(default_factory=dict)
    """Parameters of the cache, as words."""
    nproc: int | None = None
    """Processes to start on this machine, one a GPU."""
    cfg_parallel: int | None = None
    """Ranks for the branches of guidance."""
    ulysses: int | None = None
    """Ranks for the tokens of one branch, exchanging heads."""
    ring: int | None = None
    """Ranks for the tokens of one branch, passing keys and values round."""
    gather: int | None = None
    """Ranks for the tokens of one branch, gathering keys and values."""
    overlap: int | None = None
    """Head groups of attention; None divides what is large."""
    encode_prompt: str | None = None
    """Whether one rank encodes the prompt for all, ``once``, or ``each`` for itself; None is once."""
    output: str | None = None
    """Folder to write; None is a new one under ``outputs/``."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompts", (self.prompts,) if isinstance(self.prompts, str) else tuple(self.prompts))
        if not self.prompts:
            raise RequestError("there is no prompt; give one with --prompt, or a file of them with --prompts")
        for name in ("steps", "height", "width", "num_images", "num_frames", "nproc", *DEGREES):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RequestError(f"{option(name)} {value} is not possible; it is at least 1")
        if self.fps is not None and not 0 < self.fps < math.inf:
            raise RequestError(f"--fps {self.fps:g} is not possible; it is more than 0")
        if self.guidance is not None and not 0 <= self.guidance < math.inf:
            raise RequestError(f"--guidance {self.guidance:g} is not possible; it is 0 or more")
        if not 0 <= self.seed < 2**63:
            raise RequestError(f"--seed {self.seed} is not possible; it is a whole number from 0 to 2^63 - 1")
        for name in ("overlap", "encode_prompt"):
            if getattr(self, name) is not None and math.prod(getattr(self, degree) or 1 for degree in DEGREES) == 1:
                raise RequestError(
                    f"{option(name)} {getattr(self, name)} is about several ranks; say how many, as with --cfg-parallel 2 or "
                    "--ulysses 2"
                )
        if self.cache is None and self.cache_args:
            raise RequestError(f"--cache-arg {next(iter(self.cache_args))} needs a cache to go to; add --cache NAME")

    @property
    def ranks(self) -> int:
        """Processes that make one picture together, by the degrees given; `nproc` if there are none."""
        given = [getattr(self, name) for name in DEGREES]
        if all(degree is None for degree in given):
            return self.nproc or 1
        return math.prod(degree or 1 for degree in given)

    def filled(self, defaults: Mapping[str, Any]) -> DiffusionTask:
        """This task with what it leaves open taken from `defaults`, a mapping of field names."""
        values = {
            name: value for name, value in defaults.items() if name != "arguments" and getattr(self, name) is None
        }
        arguments = {**defaults.get("arguments", {}), **self.arguments}
        return dataclasses.replace(self, **values, arguments=arguments)

    def to_json(self) -> dict[str, Any]:
        """Plain data of every field."""
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return data | {
            "prompts": list(self.prompts),
            "arguments": dict(self.arguments),
            "cache_args": dict(self.cache_args),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DiffusionTask:
        """The task that `to_json` wrote.

        Raises:
            RequestError: it has a field that is not known.
        """
        names = [f.name for f in dataclasses.fields(cls)]
        for name in data:
            if name not in names:
                raise RequestError(f"a request has no field {name!r}{nearest(name, names)}")
        return cls(**data)


def option(name: str) -> str:
    """The field `name` as it is spelt on the command line."""
    return "--" + name.replace("_", "-")
