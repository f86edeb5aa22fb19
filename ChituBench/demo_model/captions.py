"""Captions of scenes, and their token ids made by other processes while the GPU is busy."""

from __future__ import annotations

import random
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import torch
from data import ABOVE, COLOR_NAMES, LEFT_OF, SINGLE_SCENE, Scenes
from model import TEXT_LENGTH, build_clip_tokenizer, build_t5_tokenizer


def with_article(name: str) -> str:
    return ("an " if name[0] in "aeiou" else "a ") + name


RELATIONS = {
    LEFT_OF: [("left of", False)] * 6
    + [("to the left of", False)] * 2
    + [("right of", True)] * 2
    + [("to the right of", True)],
    ABOVE: [("above", False)] * 6 + [("over", False), ("on top of", False)] + [("below", True)] * 2 + [("under", True)],
}
BACKGROUNDS = ["on {a} background"] * 14 + ["on {c}"] * 3 + ["on {c} background"] * 2 + ["with {a} background"]
PREFIXES = ["a picture of", "a drawing of", "an emoji of", "a photo of", "an image of"]


def plain_caption(names: list[str], layout: int, first: int, second: int, color: int) -> str:
    """The caption form that the documentation shows."""
    objects = with_article(names[first])
    if layout != SINGLE_SCENE:
        objects += f" {'left of' if layout == LEFT_OF else 'above'} {with_article(names[second])}"
    return f"{objects} on a {COLOR_NAMES[color]} background"


# What a word of a caption names: nothing, one of two objects by its place, or the only object.
ROLES = ["other", "left", "right", "top", "bottom", "alone"]


def random_caption(
    names: list[str], layout: int, first: int, second: int, color: int, rng: random.Random
) -> tuple[str, list[int]]:
    """One of many ways to say the same scene, so that users need not guess the one true phrasing.

    Returns the text and the role (an index of ROLES) of each of its words.
    """

    def plain(text: str) -> list[tuple[str, int]]:
        return [(word, 0) for word in text.split()]

    def phrase(row: int, role: int) -> list[tuple[str, int]]:
        draw, name = rng.random(), [(word, role) for word in names[row].split()]
        if draw < 0.6:
            return plain(with_article(names[row]).split()[0]) + name
        return name if draw < 0.75 else plain("a" if draw < 0.95 else "the") + name

    if layout == SINGLE_SCENE:
        objects = phrase(first, ROLES.index("alone"))
    else:
        relation, swapped = rng.choice(RELATIONS[layout])
        role = ROLES.index("left" if layout == LEFT_OF else "top")
        parts = [phrase(first, role), phrase(second, role + 1)]
        objects = parts[swapped] + plain(relation) + parts[not swapped]
    shade = COLOR_NAMES[color]
    if shade != "white" or rng.random() > 0.3:  # no background named: white
        shade_phrase = with_article(shade) if rng.random() < 0.5 else f"a {shade}"
        objects += plain(rng.choice(BACKGROUNDS).format(a=shade_phrase, c=shade))
    if rng.random() < 0.1:
        objects = plain(rng.choice(PREFIXES)) + objects
    if rng.random() < 0.04:  # an unknown word, spelled in single letters: learn to pass over it
        junk = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(2, 7)))
        objects.insert(rng.randint(0, len(objects)), (junk, 0))
    text = " ".join(word for word, _ in objects)
    return text + "." if rng.random() < 0.05 else text, [role for _, role in objects]


def caption_words(names: list[str]) -> list[str]:
    """Every whole word that captions use, sorted."""
    texts = [*names, *COLOR_NAMES, *PREFIXES, "a an the on with background picture"]
    texts += [relation for choices in RELATIONS.values() for relation, _ in choices]
    return sorted({word for text in texts for word in text.split()})


def spread_roles(ids: np.ndarray, roles: list[list[int]], tokenizer) -> np.ndarray:
    """Roles of words to roles of T5 tokens, int8 (texts, 32). A token that starts a word carries the space mark."""
    starts = np.zeros(len(tokenizer), bool)
    starts[[row for piece, row in tokenizer.get_vocab().items() if piece.startswith("\u2581")]] = True
    table = np.zeros((len(roles), TEXT_LENGTH + 1), np.int8)
    for row, line in enumerate(roles):
        table[row, 1 : len(line) + 1] = line[:TEXT_LENGTH]
    words = np.minimum(starts[ids].cumsum(1), TEXT_LENGTH)
    return np.where(ids > 1, np.take_along_axis(table, words, 1), 0).astype(np.int8)  # end mark and padding: none


def tokenize_captions(rows: list[tuple], names: list[str], variants: int, seed: int) -> tuple[np.ndarray, ...]:
    """Several phrasings of each scene: T5 ids, CLIP ids (both int16) and T5 token roles, (scenes * variants, 32)."""
    rng = random.Random(seed)
    texts, roles = zip(*(random_caption(names, *row, rng) for row in rows for _ in range(variants)))
    words = caption_words(names)
    pad = {"padding": "max_length", "max_length": TEXT_LENGTH, "truncation": True, "return_tensors": "np"}
    tokenizers = build_t5_tokenizer(words), build_clip_tokenizer(words)
    t5, clip = (tokenizer(list(texts), **pad).input_ids for tokenizer in tokenizers)
    return t5.astype(np.int16), clip.astype(np.int16), spread_roles(t5, roles, tokenizers[0])


class CaptionJob:
    """Starts tokenizing on several processes; `result` waits for the ids, with the empty caption's as the last row."""

    def __init__(self, scenes: Scenes, names: list[str], variants: int, seed: int, workers: int):
        rows = list(zip(*(c.tolist() for c in (scenes.layout, scenes.first, scenes.second, scenes.color)), strict=True))
        self.names, self.parts = names, []
        if workers == 0:
            self.parts.append(Future())
            self.parts[0].set_result(tokenize_captions(rows, names, variants, seed))
            return
        chunk = -(-len(rows) // workers)
        # spawned, not forked: the parent may already use the GPU
        self.pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
        for start in range(0, len(rows), chunk):
            part = rows[start : start + chunk]
            self.parts.append(self.pool.submit(tokenize_captions, part, names, variants, seed + start))

    def result(self) -> list[torch.Tensor]:
        """T5 ids, CLIP ids and T5 token roles, each (scenes * variants + 1, 32)."""
        words = caption_words(self.names)
        pad = {"padding": "max_length", "max_length": TEXT_LENGTH, "return_tensors": "np"}
        columns = [list(column) for column in zip(*(part.result() for part in self.parts))]
        for column, build in zip(columns, (build_t5_tokenizer, build_clip_tokenizer)):
            column.append(build(words)([""], **pad).input_ids.astype(np.int16))
        columns[2].append(np.zeros((1, TEXT_LENGTH), np.int8))
        return [torch.from_numpy(np.concatenate(column)) for column in columns]
