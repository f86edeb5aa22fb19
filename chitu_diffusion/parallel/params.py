"""How many ranks share one picture, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from chitu_hooks import PatchError
from chitu_hooks.errors import nearest

DEGREES = ("cfg", "ulysses", "ring", "gather")
TEXT = ("auto", "shard", "replicate")
PROMPT = ("once", "each")


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Degrees of parallelism. Their product is the number of ranks that make one picture together.

    Ranks beyond that product make pictures of their own: with eight ranks and a product of four there are two groups,
    which never talk to each other.

    Raises:
        PatchError: a degree is not a whole number from 1 on, there are both ring and gather, `text` or `prompt` is not one of
            its words, or `overlap` is set for degrees that exchange in another way.
    """

    cfg: int = 1
    """Branches of guidance on different ranks: parts of the batch, or whole calls one after the other."""
    ulysses: int = 1
    """Tokens on different ranks; for attention, heads instead: Jacobs et al., 2023, https://arxiv.org/abs/2309.14509."""
    ring: int = 1
    """Tokens on different ranks; keys and values go round and attention is put together from parts. With Ulysses inside it
    is known as USP: Fang and Zhao, 2024, https://arxiv.org/abs/2405.07719. Takes no mask."""
    gather: int = 1
    """Tokens on different ranks; every rank gathers all keys and values. One exchange an attention, for any number of heads."""
    text: Literal["auto", "shard", "replicate"] = "auto"
    """Whether text tokens are spread like image tokens, or whole on every rank; auto spreads them where there is one a rank."""
    prompt: Literal["once", "each"] = "once"
    """Whether the first rank of a picture encodes the prompt and the others get its embeddings, or each rank encodes it."""
    overlap: int | Literal["auto"] = "auto"
    """Head groups in which Ulysses or gather alone exchange and attend, so that one group is on its way while another
    attends: the same numbers, by other calls of the kernel. 1 exchanges everything at once; auto divides what is large, see
    `overlap.py`."""
    group: Any = None
    """Process group or one-dimensional device mesh to divide, in place of the whole world."""

    def __post_init__(self) -> None:
        for name in DEGREES:
            degree = getattr(self, name)
            if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
                raise PatchError(f"parallel: {name}={degree!r} is to be a whole number of ranks, 1 or more")
        if self.ring > 1 and self.gather > 1:
            raise PatchError(
                f"parallel: ring={self.ring} and gather={self.gather} are two ways to do one thing; leave one out"
            )
        if self.text not in TEXT:
            raise PatchError(f"parallel: unknown text={self.text!r}{nearest(str(self.text), TEXT)}")
        if self.prompt not in PROMPT:
            raise PatchError(f"parallel: unknown prompt={self.prompt!r}{nearest(str(self.prompt), PROMPT)}")
        self._check_overlap()

    def _check_overlap(self) -> None:
        if self.overlap == "auto":
            return
        if not isinstance(self.overlap, int) or isinstance(self.overlap, bool) or self.overlap < 1:
            raise PatchError(
                f"parallel: overlap={self.overlap!r} is to be a number of head groups, 1 or more; leave it out to divide by size"
            )
        if self.overlap > 1 and not self.overlaps:
            raise PatchError(
                f"parallel: overlap={self.overlap} divides the heads of ulysses or gather alone, and this is {self}; leave it out"
            )

    @property
    def outer(self) -> int:
        """Ranks that keep their queries, and get at each other's keys by ring or gather."""
        return self.ring * self.gather

    @property
    def context(self) -> int:
        """Ranks over which the tokens of one branch are spread."""
        return self.ulysses * self.outer

    @property
    def overlaps(self) -> bool:
        """Whether attention can be exchanged in head groups: the ring overlaps by itself, and USP exchanges twice."""
        return self.ring == 1 and (self.ulysses > 1) != (self.gather > 1)

    @property
    def ranks(self) -> int:
        """Ranks that make one picture."""
        return self.cfg * self.context

    def __str__(self) -> str:
        degrees = {name: getattr(self, name) for name in DEGREES}
        return " × ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1) or "one rank"
