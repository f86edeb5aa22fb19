"""Attention over tokens that are spread over ranks: exchanges before it and after it. Pure functions, traced by torch.compile.

Shape legend: B batch, s tokens of this rank, S tokens of all ranks of the group, H heads, h heads of this rank, G and g the
same for keys, D head dim, P ranks. Messages have tokens first, so that what is received from rank after rank is one sequence
without a copy: q, k and v are views of it, whatever the number of tokens of each rank.

With N > 1 head groups an exchange comes in N parts, all started before the first attention: while one group attends, the
next ones are on their way in and the former ones on their way out. Attention heads do not see each other, so each group's
result is the same as in one piece.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .collectives import finish_all_gather, pass_on, start_all_gather, start_all_to_all, wait

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(B, S, H, D) queries, (B, T, G, D) keys and values -> (B, S, H, D)."""

AttendPart = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""The same, and the float32 (B, H, S) log-sum-exp."""


def ulysses(
    q_BsHD: Tensor, k_BsGD: Tensor, v_BsGD: Tensor, sizes: tuple[int, ...], group: str, attend: Attend, N: int = 1
) -> Tensor:
    """Heads for tokens, in one message; attention over all tokens with a share of the heads; and back, in another.

    Args:
        sizes: tokens of each rank of the group.
        attend: what attends over (B, S, h, D).
        N: head groups; it divides h and g.
    """
    B, s, H, _ = q_BsHD.shape
    P = len(sizes)
    h, g = H // P // N, k_BsGD.shape[2] // P // N
    coming = [
        start_all_to_all(message_PsBnD.flatten(0, 1), sizes, (s,) * P, group)
        for message_PsBnD in by_rank(q_BsHD, k_BsGD, v_BsGD, P, N)
    ]
    going = []
    for found_SBnD in coming:
        out_BShD = attend(*unpacked(wait(found_SBnD), h, g))
        going.append(start_all_to_all(out_BShD.transpose(0, 1), (s,) * P, sizes, group))
    return brought_back(going, P, s, B)


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
    N: int = 1,
) -> Tensor:
    """`ulysses` where each rank holds the same `text` tokens beside its own image tokens.

    Text needs no exchange on the way in, since every rank has it; on the way out each rank has it for its own heads only,
    so it rides to every rank in the same message as the image.
    """
    B, s, H, _ = q_BsHD.shape
    P, n = len(sizes), sizes[index]
    h, g = H // P // N, k_BsGD.shape[2] // P // N
    text_at, image_at = (0, text) if text_first else (n, 0)
    messages = by_rank(q_BsHD, k_BsGD, v_BsGD, P, N)
    coming = [
        start_all_to_all(message_PsBnD[:, image_at : image_at + n].flatten(0, 1), sizes, (n,) * P, group)
        for message_PsBnD in messages
    ]
    going = []
    sent = [size + text for size in sizes]
    for message_PsBnD, pictures_SBnD in zip(messages, coming):
        words, pictures = message_PsBnD[index, text_at : text_at + text], wait(pictures_SBnD)
        found_SBnD = torch.cat([words, pictures] if text_first else [pictures, words])
        out_SBhD = attend(*unpacked(found_SBnD, h, g)).transpose(0, 1)
        pictures, words = (out_SBhD[text:], out_SBhD[:text]) if text_first else (out_SBhD[:-text], out_SBhD[-text:])
        reply = []
        for run in pictures.split(list(sizes)):
            reply += [words, run] if text_first else [run, words]
        going.append(start_all_to_all(torch.cat(reply), (s,) * P, sent, group))
    return brought_back(going, P, s, B)


def gather(
    q_BsHD: Tensor, k_BsGD: Tensor, v_BsGD: Tensor, sizes: tuple[int, ...], group: str, attend: Attend, N: int = 1
) -> Tensor:
    """All keys and values on every rank, in one message; queries stay where they are.

    Args:
        N: head groups; it divides H and G.
    """
    return gather_shared(q_BsHD, k_BsGD, v_BsGD, sizes, 0, True, group, attend, N)


def gather_shared(
    q_BsHD: Tensor,
    k_BsGD: Tensor,
    v_BsGD: Tensor,
    sizes: tuple[int, ...],
    text: int,
    text_first: bool,
    group: str,
    attend: Attend,
    N: int = 1,
) -> Tensor:
    """`gather` where each rank holds the same `text` tokens beside its own image tokens."""
    g, s = k_BsGD.shape[2] // N, k_BsGD.shape[1]
    first = text if text_first else s - text
    messages = [torch.cat(pair, 2).transpose(0, 1) for pair in zip(head_groups(k_BsGD, N), head_groups(v_BsGD, N))]
    coming = [
        start_all_gather(message_sBnD[first:] if text_first else message_sBnD[:first], sizes, group)
        for message_sBnD in messages
    ]
    outs = []
    for q_BshD, message_sBnD, coming_SBnD in zip(head_groups(q_BsHD, N), messages, coming):
        found_SBnD = finish_all_gather(coming_SBnD, sizes)
        if text:
            own = [message_sBnD[:first], found_SBnD] if text_first else [found_SBnD, message_sBnD[first:]]
            found_SBnD = torch.cat(own)
        found_BSnD = found_SBnD.transpose(0, 1)
        outs.append(attend(q_BshD, found_BSnD[:, :, :g], found_BSnD[:, :, g:]))
    return outs[0] if N == 1 else torch.cat(outs, 2)


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
            message_sBnD = wait(coming)
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


def head_groups(tensor_BsHD: Tensor, N: int) -> list[Tensor]:
    """The heads in N runs."""
    return [tensor_BsHD] if N == 1 else list(tensor_BsHD.chunk(N, 2))


def by_rank(q_BsHD: Tensor, k_BsGD: Tensor, v_BsGD: Tensor, P: int, N: int) -> list[Tensor]:
    """What each rank is to get of this rank's tokens, its share of the heads of q, k and v, in N head groups: each
    (P, s, B, h + 2 g, D)."""
    parts = [t.unflatten(2, (P, N, -1)).permute(3, 2, 1, 0, 4, 5) for t in (q_BsHD, k_BsGD, v_BsGD)]
    return [torch.cat([part_NPsBnD[place] for part_NPsBnD in parts], 3) for place in range(N)]


def brought_back(going: list[Tensor], P: int, s: int, B: int) -> Tensor:
    """(B, s, H, D) from the head groups that come back, each with the heads of rank after rank."""
    back = [wait(one).unflatten(0, (P, s)) for one in going]
    back_PsBhD = back[0] if len(back) == 1 else torch.cat(back, 3)
    return back_PsBhD.permute(2, 1, 0, 3, 4).flatten(2, 3)


def unpacked(found_SBnD: Tensor, h: int, g: int) -> tuple[Tensor, Tensor, Tensor]:
    """(B, S, h, D) and (B, S, g, D) views of q, k and v in what was received."""
    found_BSnD = found_SBnD.transpose(0, 1)
    return found_BSnD[:, :, :h], found_BSnD[:, :, h : h + g], found_BSnD[:, :, h + g :]
