"""Teach the trained text encoder which place each named object has, on a CPU in two minutes.

    python roles.py --model model --out model

After the first training run the T5 encoder is close to a bag of words: its attention logits have grown so large that
almost every token looks at one other token only, and relative positions no longer count. Dividing the query weights by
ten and letting half of the heads look ahead and half back makes the order of the words learnable again; a linear head on
the outputs then asks for it, while the outputs stay close to what the transformer is used to.
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from captions import ROLES, tokenize_captions
from data import all_singles, load_names, random_pairs
from model import look_both_ways
from transformers import T5EncoderModel

LENGTH = 18
"""Tokens that are looked at; only a background phrase is ever cut off."""


def loosen(t5: T5EncoderModel) -> None:
    """Undo the saturation of the attention, and give every head a direction to look in."""
    look_both_ways(t5)
    with torch.no_grad():
        for block in t5.encoder.block:
            block.layer[0].SelfAttention.q.weight.mul_(0.1)


def texts(names: list[str], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """T5 ids and token roles of 28,000 captions, (captions, LENGTH) each."""
    generator = torch.Generator().manual_seed(seed)
    pairs, lone = random_pairs(24_000, len(names), generator), all_singles(len(names))
    lone = lone[torch.randperm(len(lone), generator=generator)[:4_000]]
    rows = [
        row
        for part in (pairs, lone)
        for row in zip(*(column.tolist() for column in (part.layout, part.first, part.second, part.color)))
    ]
    ids, _, roles = tokenize_captions(rows, names, 1, seed)
    return torch.from_numpy(ids).long()[:, :LENGTH], torch.from_numpy(roles).long()[:, :LENGTH]


def teach(t5: T5EncoderModel, ids: torch.Tensor, roles: torch.Tensor, steps: int, batch: int) -> float:
    """Train `t5` in place.

    Returns:
        Share of the words of two-object captions whose place the head told right, over the last 100 steps.
    """
    before = copy.deepcopy(t5).eval()
    loosen(t5)
    head = torch.nn.Linear(t5.config.d_model, len(ROLES))
    bias = t5.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
    others = [parameter for parameter in t5.parameters() if parameter is not bias]
    rates = (2e-3, 3e-2, 4e-3)
    optimizer = torch.optim.AdamW(
        [{"params": others}, {"params": [bias]}, {"params": head.parameters()}], betas=(0.9, 0.99), weight_decay=0.0
    )
    weight = torch.tensor([0.2] + [1.0] * (len(ROLES) - 1))  # most tokens name nothing
    right: list[float] = []
    for step in range(steps):
        for group, rate in zip(optimizer.param_groups, rates):
            group["lr"] = rate * min(1, (step + 1) / 50) * min(1, (steps - step) / (0.4 * steps))
        rows = torch.randint(len(ids), (batch,))
        words = t5(ids[rows])[0]
        with torch.no_grad():
            old = before(ids[rows])[0]
        guesses = head(words)
        drift = (words - old).pow(2).mean() / old.pow(2).mean()
        loss = F.cross_entropy(guesses.flatten(0, 1), roles[rows].flatten(), weight=weight) + 0.1 * drift
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(t5.parameters(), 1.0)
        optimizer.step()
        placed = (roles[rows] >= ROLES.index("left")) & (roles[rows] <= ROLES.index("bottom"))
        right.append(float((guesses.argmax(-1) == roles[rows])[placed].float().mean()))
    return sum(right[-100:]) / len(right[-100:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="model folder to read the text encoder of")
    parser.add_argument("--out", required=True, help="model folder whose text encoder is replaced")
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--seed", type=int, default=4)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    t5 = T5EncoderModel.from_pretrained(Path(options.model, "text_encoder_2"), dtype=torch.float32).train()
    started = time.monotonic()
    share = teach(t5, *texts(load_names(), options.seed), options.steps, options.batch)
    print(f"{share:.1%} of the placed words told right after {time.monotonic() - started:.0f} s")
    config = Path(options.out, "text_encoder_2", "config.json")
    kept = config.read_text()
    t5.half().save_pretrained(config.parent)
    config.write_text(kept)  # it names float32 as the type to load in, see `model.save_folder`


if __name__ == "__main__":
    main()
