"""Attention over tokens that are spread over ranks: exchanges before it and after it. Pure functions, traced by torch.compile.

Shape legend: B batch, s tokens of this rank, S tokens of all ranks of the group, H heads, h heads of this rank, G and g the
same for keys, D head dim, P ranks. Messages have tokens first, so that what is received from rank after rank is one sequence
without a copy: q, k and v are views of it, whatever the number of tokens of each rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .collectives import all_gather, all_to_all, ops, pass_on

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(B, S, H, D) queries, (B, T, G, D) keys and values -> (B, S, H, D)."""

AttendPart = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""The same, and the float32 (B, H, S) log-sum-exp."""


def ulysses(
    q_BsHD: Tensor, k_BsGD: Tensor, v_BsGD: Tensor, sizes: tuple[int, ...], group: str, attend: Attend
) -> Tensor:
    """Heads for tokens, in one message; attention over all tokens with a share of the heads; and back, in another.

    Args:
        sizes: tokens of each rank of the group.
        attend: what attends over (B, S, h, D).
    """
    B, s, H, D = q_BsHD.shape
    P = len(sizes)
    h, g = H // P, k_BsGD.shape[2] // P
    message_PsBnD = by_rank(q_BsHD, k_BsGD, v_BsGD, P)
    found_SBnD = all_to_all(message_PsBnD.flatten(0, 1), sizes, (s,) * P, group)
    out_BShD = attend(*unpacked(found_SBnD, h, g))
    back_PsBhD = all_to_all(out_BShD.transpose(0, 1), (s,) * P, sizes, group).view(P, s, B, h, D)
    return back_PsBhD.permute(2, 1, 0, 3, 4).reshape(B, s, H, D)


def ulysses_shared(
    q_BsHD: Tensor,
    k_BsGD: Tensor,
    v_BsGD: Tensor,
    sizes: tuple[int, ...],
    index: int,
    text: int,
    text_first: bool,
    group: str,
    attend: Attend,
) -> Tensor:
    """`ulysses` where each rank holds the same `text` tokens beside its own image tokens.

    Text needs no exchange on the way in, since every rank has it; on the way out each rank has it for its own heads only,
    so it rides to every rank in the same message as the image.
    """
    B, s, H, D = q_BsHD.shape
    P, n = len(sizes), sizes[index]
    h, g = H // P, k_BsGD.shape[2] // P
    message_PsBnD = by_rank(q_BsHD, k_BsGD, v_BsGD, P)
    text_at, image_at = (0, text) if text_first else (n, 0)
    words = message_PsBnD[index, text_at : text_at + text]
    pictures = all_to_all(message_PsBnD[:, image_at : image_at + n].flatten(0, 1), sizes, (n,) * P, group)
    found_SBnD = torch.cat([words, pictures] if text_first else [pictures, words])
    out_SBhD = attend(*unpacked(found_SBnD, h, g)).transpose(0, 1)
    pictures, words = (out_SBhD[text:], out_SBhD[:text]) if text_first else (out_SBhD[:-text], out_SBhD[-text:])
    reply = []
    for run in pictures.split(list(sizes)):
        reply += [words, run] if text_first else [run, words]
    sent = [size + text for size in sizes]
    back_PsBhD = all_to_all(torch.cat(reply), (s,) * P, sent, group).view(P, s, B, h, D)
    return back_PsBhD.permute(2, 1, 0, 3, 4).reshape(B, s, H, D)


def gather(
    q_BsHD: Tensor, k_BsGD: Tensor, v_BsGD: Tensor, sizes: tuple[int, ...], group: str, attend: Attend
) -> Tensor:
    """All keys and values on every rank, in one message; queries stay where they are."""
    G = k_BsGD.shape[2]
    message_sBnD = torch.cat([k_BsGD, v_BsGD], 2).transpose(0, 1)
    found_BSnD = all_gather(message_sBnD, sizes, group).transpose(0, 1)
    return attend(q_BsHD, found_BSnD[:, :, :G], found_BSnD[:, :, G:])


def gather_shared(
    q_BsHD: Tensor,
    k_BsGD: Tensor,
    v_BsGD: Tensor,
    sizes: tuple[int, ...],
    text: int,
    text_first: bool,
    group: str,
    attend: Attend,
) -> Tensor:
    """`gather` where each rank holds the same `text` tokens beside its own image tokens."""
    G = k_BsGD.shape[2]
    message_sBnD = torch.cat([k_BsGD, v_BsGD], 2).transpose(0, 1)
    if text_first:
        found = torch.cat([message_sBnD[:text], all_gather(message_sBnD[text:], sizes, group)])
    else:
        found = torch.cat([all_gather(message_sBnD[:-text], sizes, group), message_sBnD[-text:]])
    found_BSnD = found.transpose(0, 1)
    return attend(q_BsHD, found_BSnD[:, :, :G], found_BSnD[:, :, G:])


def ring(
    q_BsHD: Tensor, k_BsGD: Tensor, v_BsGD: Tensor, sizes: tuple[int, ...], index: int, group: str, attend: AttendPart
) -> Tensor:
    """Keys and values go round the ranks while each attends to those that it has just now; the parts are put together in
    float32 by their log-sum-exp: Liu et al., 2023, https://arxiv.org/abs/2310.01889."""
    G = k_BsGD.shape[2]
    message_sBnD = torch.cat([k_BsGD, v_BsGD], 2).transpose(0, 1).contiguous()
    out, lse = None, None
    for turn in range(len(sizes)):
        last = turn == len(sizes) - 1
        coming = None if last else pass_on(message_sBnD, sizes, index, turn, group)
        found_BsnD = message_sBnD.transpose(0, 1)
        part_BsHD, part_BHs = attend(q_BsHD, found_BsnD[:, :, :G], found_BsnD[:, :, G:])
        out, lse = joined(out, lse, part_BsHD, part_BHs)
        if coming is not None:
            message_sBnD = ops.wait_tensor(coming)
    return out.to(q_BsHD.dtype)  # type: ignore[union-attr]


def joined(
    out_BsHD: Tensor | None, lse_BHs: Tensor | None, part_BsHD: Tensor, part_BHs: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys from attention over each, in float32."""
    part_BsHD = part_BsHD.float()
    if out_BsHD is None or lse_BHs is None:
        return part_BsHD, part_BHs
    both_BHs = torch.logaddexp(lse_BHs, part_BHs)
    old, new = (torch.exp(one - both_BHs).transpose(1, 2).unsqueeze(-1) for one in (lse_BHs, part_BHs))
    return out_BsHD * old + part_BsHD * new, both_BHs


def by_rank(q_BsHD: Tensor, k_BsGD: Tensor, v_BsGD: Tensor, P: int) -> Tensor:
    """What each rank is to get of this rank's tokens: (P, s, B, h + 2 g, D), its share of the heads of q, k and v."""
    parts = [t.unflatten(2, (P, -1)).permute(2, 1, 0, 3, 4) for t in (q_BsHD, k_BsGD, v_BsGD)]
    return torch.cat(parts, 3)


def unpacked(found_SBnD: Tensor, h: int, g: int) -> tuple[Tensor, Tensor, Tensor]:
    """(B, S, h, D) and (B, S, g, D) views of q, k and v in what was received."""
    found_BSnD = found_SBnD.transpose(0, 1)
    return found_BSnD[:, :, :h], found_BSnD[:, :, h : h + g], found_BSnD[:, :, h + g :]
