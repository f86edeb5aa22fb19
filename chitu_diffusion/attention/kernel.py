"""What a kernel is: a name, what it can take, and how to run it.

Shape legend: B batch, S query tokens, T key tokens, H heads, G key heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from chitu_hooks import Exactness

HALF = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)

KEY = "key"
"""A boolean mask of keys alone, (B or 1, 1, 1, T): which tokens are padding."""
BOOLEAN = "boolean"
"""A boolean mask that differs between queries or heads."""
ADDITIVE = "additive"
"""A mask of floats that are added to the scores."""
MASKS = (KEY, BOOLEAN, ADDITIVE)


class AttentionCall(NamedTuple):
    """Everything about one attention call that decides whether a kernel can do it: plain values only.

    Attributes:
        device: its type, such as `cpu` or `cuda`.
        head_dim, value_dim: size of one head of the queries and keys, and of the values.
        heads, key_heads: number of heads of the queries, and of the keys and values.
        mask: one of `MASKS`, "" for none, or a word for what no kernel takes.
        same_length: as many query tokens as key tokens; may be True where `causal` is not set.
        one_key: a single key token.
        gradient: the result will be differentiated.
        key_tokens: how many, where the kernel asked has a `key_block`; else 0, since a length is a guard in a graph.
        foreign: an argument of diffusers' dispatcher that only one of its own backends knows, or "".
    """

    dtype: torch.dtype
    device: str
    head_dim: int
    heads: int
    key_heads: int
    value_dim: int
    mask: str = ""
    causal: bool = False
    dropout: float = 0.0
    same_length: bool = True
    one_key: bool = False
    gradient: bool = False
    foreign: str = ""
    key_tokens: int = 0


@dataclass(frozen=True)
class Abilities:
    """What a kernel can take; anything outside is refused by name.

    Attributes:
        head_dims: the only head dims that fit, or () for every one up to `max_head_dim` that is a multiple of
            `head_dim_multiple`.
        masks: the kinds of mask it takes, of `MASKS`. None takes a mask and `causal` at once: torch does not either.
        causal_cross: causal with unequal numbers of queries and keys, the first query seeing the first key as in
            torch. FlashAttention starts from the other corner.
        grouped: fewer key heads than query heads.
        mixed_dims: values whose head dim is not that of the keys.
        one_key: a single key token.
        key_block: key tokens come in multiples of this, unless the call is causal.
        gradient: a result that can be differentiated.
        capability, capability_below: lowest CUDA compute capability, and the first that it does not run on.
    """

    devices: tuple[str, ...] = ("cuda",)
    dtypes: tuple[torch.dtype, ...] = HALF
    max_head_dim: int = 256
    head_dim_multiple: int = 1
    head_dims: tuple[int, ...] = ()
    masks: tuple[str, ...] = ()
    causal: bool = True
    causal_cross: bool = False
    grouped: bool = True
    mixed_dims: bool = False
    one_key: bool = True
    key_block: int = 1
    gradient: bool = False
    capability: tuple[int, int] = (0, 0)
    capability_below: tuple[int, int] = (99, 0)
    words: dict[str, str] = field(default_factory=dict, init=False, compare=False)
    """The parts of the sentences below, written once: this code is traced."""

    def __post_init__(self) -> None:
        dims = f"a head dim of at most {self.max_head_dim}"
        if self.head_dim_multiple > 1:
            dims += f" in multiples of {self.head_dim_multiple}"
        if self.head_dims:
            dims = f"head dims {', '.join(map(str, self.head_dims))}"
        masks = " and ".join(self.masks)
        self.words.update(
            devices=" and ".join(self.devices),
            dtypes=", ".join(word(dtype) for dtype in self.dtypes),
            dims=dims,
            masks=f"no {{}} mask, only {masks} ones" if masks else "no mask",
        )

    def refusal(self, call: AttentionCall) -> str | None:
        """Why `call` cannot be done, with the numbers, or None."""
        if call.device not in self.devices:
            return f"runs on {self.words['devices']}, not on {call.device}"
        if call.dtype not in self.dtypes:
            return f"takes {self.words['dtypes']}, not {word(call.dtype)}"
        dim = call.head_dim
        fits = dim <= self.max_head_dim and dim % self.head_dim_multiple == 0
        if not (dim in self.head_dims if self.head_dims else fits):
            return f"takes {self.words['dims']}, not {dim}"
        if call.value_dim != dim and not self.mixed_dims:
            return f"needs one head dim, and this layer has {dim} for keys and {call.value_dim} for values"
        if call.heads % call.key_heads:
            return f"needs heads in whole groups, and this layer has {call.heads} on {call.key_heads} key heads"
        if call.key_heads != call.heads and not self.grouped:
            return f"needs as many key heads as heads, and this layer has {call.key_heads} and {call.heads}"
        if call.one_key and not self.one_key:
            return "needs at least 2 key tokens, and this layer has 1"
        if call.key_tokens % self.key_block and not call.causal:
            return f"needs key tokens in multiples of {self.key_block}, and this layer has {call.key_tokens}"
        return self._mask_refusal(call) or self._mode_refusal(call)

    def _mask_refusal(self, call: AttentionCall) -> str | None:
        if call.mask and call.mask not in MASKS:
            return f"takes boolean and floating masks, and this layer has one of {call.mask}"
        if call.mask and call.causal:
            return "takes a mask or causal order, and this layer asks for both"
        if call.mask and call.mask not in self.masks:
            return f"takes {self.words['masks'].replace('{}', call.mask)}, and this layer has one ({call.mask})"
        if call.causal and not self.causal:
            return "has no causal form, and this layer is causal"
        if call.causal and not call.same_length and not self.causal_cross:
            return "has no causal form for unequal numbers of queries and keys, and this layer asks for one"
        return None

    def _mode_refusal(self, call: AttentionCall) -> str | None:
        if call.dropout:
            return f"has no dropout, and this layer asks for {call.dropout}"
        if call.gradient and not self.gradient:
            return "computes no gradient, and one is asked for here (use torch.no_grad, or sdpa_math)"
        if call.foreign:
            return f"does not know {call.foreign}, which this layer passes to diffusers' own backends"
        return None

    def capability_refusal(self) -> str | None:
        """Why this machine's CUDA device cannot run it, or None."""
        if not torch.cuda.is_available():
            return "needs a CUDA device, and torch sees none"
        have = torch.cuda.get_device_capability()
        if have < self.capability:
            return f"needs compute capability {_version(self.capability)} or newer, not {_version(have)}"
        if have >= self.capability_below:
            return f"runs below compute capability {_version(self.capability_below)}, not on {_version(have)}"
        return None


def _version(pair: tuple[int, int]) -> str:
    return f"{pair[0]}.{pair[1]}"


def word(dtype: torch.dtype) -> str:
    """`bfloat16` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


class Kernel:
    """Base class of the kernels.

    Attributes:
        name: the word for it in `patch(pipe, attention=name)`.
        exactness: `close`, or `lossy` if it quantises.
        abilities: what it can take.
        returns_lse: whether there is `run_with_lse`, which ring attention merges partial results by.
    """

    name: str = ""
    exactness: Exactness = "close"
    abilities: Abilities = Abilities()
    returns_lse: bool = False

    def available(self) -> str | None:
        """Why it cannot be used on this machine, or None; found without importing what could break the process."""
        return None

    def load(self) -> None:
        """Import what `run` needs; called when patching, since traced code cannot import.

        Raises:
            ImportError, OSError, RuntimeError, AttributeError: the package is there and does not work.
        """

    def refusal(self, call: AttentionCall) -> str | None:
        """Why it cannot do `call`, with the numbers, or None. Traced by torch.compile."""
        return self.abilities.refusal(call)

    def run(
        self,
        q_BSHD: torch.Tensor,
        k_BTGD: torch.Tensor,
        v_BTGD: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        """The (B, S, H, D) output; zeros in the rows of queries that a mask leaves no key.

        Args:
            mask: boolean (True takes part) or additive, broadcasting to (B, H, S, T), or None.
            causal: query i sees keys 0 to i.
            scale: factor of q·k, None for 1/sqrt(D).
        """
        raise NotImplementedError

    def run_with_lse(
        self, q_BSHD: torch.Tensor, k_BTGD: torch.Tensor, v_BTGD: torch.Tensor, scale: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Without a mask: the (B, S, H, D) output, and the float32 (B, H, S) log of the sums of exp(scale q·k)."""
        raise NotImplementedError(f"{self.name} returns no log-sum-exp")
