"""Tiny pipelines with text encoders and tokenizers, saved to a folder: what a command line loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny
import torch
import transformers as T
from tokenizers.pre_tokenizers import ByteLevel

SIZES: dict[str, list[str]] = {
    "flux": ["--height", "16", "--width", "16", "--set", "max_sequence_length=16"],
    "sd3": ["--height", "16", "--width", "16", "--set", "max_sequence_length=16"],
    "wan": ["--height", "16", "--width", "16", "--num-frames", "5", "--set", "max_sequence_length=16"],
}
"""Command-line options for a small and quick call of each."""


def save(name: str, folder: Path) -> Path:
    """Build the pipeline `name` of `SIZES` and save it as `folder`."""
    text(name).save_pretrained(folder)
    return folder


def text(name: str) -> Any:
    """The pipeline `name` of `tiny.TINY` with text encoders that fit it."""
    pipe = tiny.build(name)
    parts = {key: value for key, value in pipe.components.items() if value is not None}
    torch.manual_seed(7)
    if name == "flux":
        parts |= {"text_encoder": clip(T.CLIPTextModel), "tokenizer": clip_tokenizer()}
        parts |= {"text_encoder_2": t5(T.T5EncoderModel, T.T5Config), "tokenizer_2": t5_tokenizer()}
    elif name == "sd3":
        for suffix in ("", "_2"):
            parts |= {
                f"text_encoder{suffix}": clip(T.CLIPTextModelWithProjection),
                f"tokenizer{suffix}": clip_tokenizer(),
            }
        parts |= {"text_encoder_3": t5(T.T5EncoderModel, T.T5Config), "tokenizer_3": t5_tokenizer()}
    else:
        parts |= {"text_encoder": t5(T.UMT5EncoderModel, T.UMT5Config), "tokenizer": t5_tokenizer()}
    made = type(pipe)(**parts)
    made.set_progress_bar_config(disable=True)
    return made


def clip(cls: type) -> Any:
    config = T.CLIPTextConfig(
        vocab_size=600, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        projection_dim=32, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    return cls(config).eval()


def clip_tokenizer() -> Any:
    letters = sorted(ByteLevel.alphabet())
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    return T.CLIPTokenizer(vocab={word: number for number, word in enumerate(words)}, merges=[], model_max_length=77)


def t5(cls: type, config: type) -> Any:
    made = config(vocab_size=200, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2, is_encoder_decoder=False)
    return cls(made).eval()


def t5_tokenizer() -> Any:
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0)]
    pieces += [(chr(code), -3.0) for code in range(33, 127)]
    return T.T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=64)
