"""What a kernel is: a name, what it can take, and how to run it.

Shape legend: B batch, S query tokens, T key tokens, H heads, G key heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from chitu_hooks import Exactness

HALF = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class AttentionCall:
    """Everything about one attention call that decides whether a kernel can do it."""

    dtype: torch.dtype
    device: str
    """Device type, such as `cpu` or `cuda`."""
    head_dim: int
    heads: int
    key_heads: int
    masked: bool
    causal: bool
    dropout: float
    same_length: bool = True
    """As many query tokens as key tokens."""


@dataclass(frozen=True)
class Abilities:
    """What a kernel can take; anything outside is refused by name."""

    devices: tuple[str, ...] = ("cuda",)
    dtypes: tuple[torch.dtype, ...] = HALF
    max_head_dim: int = 256
    head_dim_multiple: int = 1
    mask: bool = False
    causal: bool = True
    grouped: bool = True
    """Fewer key heads than query heads."""
    causal_cross: bool = False
    """Causal with as many queries as keys only, unless True: kernels disagree on which corner the mask starts from."""
    capability: tuple[int, int] = (0, 0)
    """Lowest CUDA compute capability."""
    capability_below: tuple[int, int] = (99, 0)
    """First CUDA compute capability that it does not run on."""

    def refusal(self, call: AttentionCall) -> str | None:
        """Why `call` cannot be done, with the numbers, or None."""
        if call.device not in self.devices:
            return f"runs on {' and '.join(self.devices)}, not on {call.device}"
        if call.dtype not in self.dtypes:
            names = ", ".join(_word(dtype) for dtype in self.dtypes)
            return f"takes {names}, not {_word(call.dtype)}"
        if call.head_dim > self.max_head_dim or call.head_dim % self.head_dim_multiple:
            fits = f"at most {self.max_head_dim}"
            if self.head_dim_multiple > 1:
                fits += f" in multiples of {self.head_dim_multiple}"
            return f"takes a head dim of {fits}, not {call.head_dim}"
        if call.masked and not self.mask:
            return "takes no mask, and this layer has one"
        if call.causal and not self.causal:
            return "has no causal form, and this layer is causal"
        if call.causal and not call.same_length and not self.causal_cross:
            return "has no causal form for unequal numbers of queries and keys, and this layer asks for one"
        if call.key_heads != call.heads and not self.grouped:
            return f"needs as many key heads as heads, and this layer has {call.key_heads} and {call.heads}"
        if call.dropout:
            return f"has no dropout, and this layer asks for {call.dropout}"
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


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Kernel:
    """Base class of the kernels.

    Attributes:
        name: the word for it in `patch(pipe, attention=name)`.
        exactness: `close`, or `lossy` if it quantises.
        abilities: what it can take.
        returns_lse: whether `run_lse` gives the log-sum-exp that ring attention merges by.
    """

    name: str = ""
    exactness: Exactness = "close"
    abilities: Abilities = Abilities()
    returns_lse: bool = False

    def available(self) -> str | None:
        """Why it cannot be used on this machine, or None; found without importing what could break the process."""
        return None

    def load(self) -> None:
        """Import what `run` needs; called once when patching, since traced code cannot import."""

    def refusal(self, call: AttentionCall) -> str | None:
        """Why it cannot do `call`, with the numbers, or None."""
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
        """The (B, S, H, D) output.

        Args:
            mask: boolean (True takes part) or additive, broadcasting to (B, H, S, T), or None.
            causal: query i sees keys 0 to i.
            scale: factor of q·k, None for 1/sqrt(D).
        """
        raise NotImplementedError
