"""The parts of the embedded FLUX-style model: their sizes, their tokenizers, and how they are put into one folder."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5Tokenizer

TEXT_LENGTH = 32  # the recommended `max_sequence_length`, and what the CLIP tokenizer pads to
SHIFT = 1.5  # static timestep shift of the scheduler; training draws noise levels to match

SIZES = {
    "full": {"vae": (32, 64, 128, 128), "groups": 8, "heads": 8, "double": 4, "single": 8, "t5": 256, "clip": 128},
    "smoke": {"vae": (8, 8, 16, 16), "groups": 4, "heads": 2, "double": 1, "single": 2, "t5": 32, "clip": 32},
}


def build_t5_tokenizer(words: list[str]) -> T5Tokenizer:
    """Whole words first; single characters catch everything else. Capitalised words get pieces of their own."""
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -5.0)]
    vocab += [(chr(code), -10.0) for code in range(33, 127)]
    known = {piece for piece, _ in vocab}
    for word in words:
        for piece in ("\u2581" + word, "\u2581" + word.capitalize()):
            if piece not in known:
                known.add(piece)
                vocab.append((piece, -1.0))
    return T5Tokenizer(vocab=vocab, extra_ids=0, additional_special_tokens=None, model_max_length=TEXT_LENGTH)


def build_clip_tokenizer(words: list[str]) -> CLIPTokenizer:
    """Byte-pair merges that lead from letters to every whole word.

    Each word is first merged by the rules made for the words before it; rules that join what is left, from left to
    right, are then added behind those. Later rules rank lower, so they cannot break an earlier word.
    """
    alphabet = [chr(code) for code in range(33, 127)]  # the byte-level alphabet of printable ASCII
    # every other byte, under the stand-in characters that byte-level tokenizers use
    alphabet += [chr(256 + n) for n in range(68)] + [chr(c) for c in (*range(161, 173), *range(174, 256))]
    pieces = dict.fromkeys(alphabet + [char + "</w>" for char in alphabet])
    merges: dict[tuple[str, str], int] = {}
    for word in words:
        if not word.isalpha():
            continue
        symbols = [*word[:-1], word[-1] + "</w>"]
        while len(symbols) > 1:
            ranked = [(merges.get(pair, len(merges)), at) for at, pair in enumerate(itertools.pairwise(symbols))]
            _, at = min(ranked)
            pair = (symbols[at], symbols[at + 1])
            merges.setdefault(pair, len(merges))
            symbols[at : at + 2] = ["".join(pair)]
            pieces.setdefault(symbols[at])
    vocab = {piece: row for row, piece in enumerate([*pieces, "<|startoftext|>", "<|endoftext|>"])}
    # The end mark has the highest id: the text model then finds it by either of its two conventions.
    return CLIPTokenizer(vocab=vocab, merges=list(merges), model_max_length=TEXT_LENGTH)


def build_vae(size: dict) -> AutoencoderKL:
    """8x smaller, 16 channels. No attention in the middle: plain scenes do not need it, and it costs time."""
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=size["vae"],
        layers_per_block=1,
        latent_channels=16,
        norm_num_groups=size["groups"],
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
        sample_size=256,
        scaling_factor=1.0,
        shift_factor=0.0,
    )


def build_text_encoders(size: dict, t5_tokenizer, clip_tokenizer) -> tuple[T5EncoderModel, CLIPTextModel]:
    """A two-layer T5 encoder for the token stream and a two-layer CLIP text model for the pooled vector."""
    width = size["t5"]
    t5 = T5EncoderModel(
        T5Config(
            vocab_size=len(t5_tokenizer),
            d_model=width,
            d_kv=32,
            num_heads=width // 32,
            d_ff=2 * width,
            num_layers=2,
            dropout_rate=0.0,
            feed_forward_proj="gated-gelu",
            is_encoder_decoder=False,
            use_cache=False,
            pad_token_id=0,
            eos_token_id=1,
        )
    )
    look_both_ways(t5)
    width = size["clip"]
    clip = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(clip_tokenizer),
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=2,
            num_attention_heads=width // 32,
            max_position_embeddings=TEXT_LENGTH,
            projection_dim=width,
            bos_token_id=clip_tokenizer.bos_token_id,
            eos_token_id=clip_tokenizer.eos_token_id,
            pad_token_id=clip_tokenizer.pad_token_id,
        )
    )
    return t5, clip


def look_both_ways(t5: T5EncoderModel) -> None:
    """Let half of the heads look ahead and half back, by the buckets of T5's relative positions (Raffel et al., 2020,
    §2.1: 16 for earlier tokens, then 16 for later ones), so that the order of words is easy to learn."""
    bias = t5.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
    with torch.no_grad():
        bias[17:32, 0::2] -= 5.0
        bias[1:16, 1::2] -= 5.0


def build_transformer(size: dict) -> FluxTransformer2DModel:
    """A small FLUX transformer whose blocks start as the identity, which steadies the first steps."""
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=64,
        num_layers=size["double"],
        num_single_layers=size["single"],
        attention_head_dim=32,
        num_attention_heads=size["heads"],
        joint_attention_dim=size["t5"],
        pooled_projection_dim=size["clip"],
        guidance_embeds=False,
        axes_dims_rope=(8, 12, 12),
    )
    gates = [block.norm1.linear for block in transformer.transformer_blocks]
    gates += [block.norm1_context.linear for block in transformer.transformer_blocks]
    gates += [block.norm.linear for block in transformer.single_transformer_blocks]
    for layer in [*gates, transformer.norm_out.linear, transformer.proj_out]:
        torch.nn.init.zeros_(layer.weight)
        torch.nn.init.zeros_(layer.bias)
    return transformer


def build_scheduler() -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(shift=SHIFT, use_dynamic_shifting=False)


def share_capitalised_embeddings(t5: T5EncoderModel, tokenizer: T5Tokenizer) -> None:
    """Captions are lower case; afterwards a capitalised word simply gets the embedding of the plain one."""
    table = t5.get_input_embeddings().weight.data
    vocab = tokenizer.get_vocab()
    for piece, row in vocab.items():
        plain = vocab.get(piece.lower())
        if plain is not None and plain != row and not piece.startswith("<"):
            table[row] = table[plain]


def save_folder(folder: str | Path, vae, transformer, t5, clip, t5_tokenizer, clip_tokenizer) -> None:
    """Write a FluxPipeline folder with float16 weights. The modules given are converted in place."""
    share_capitalised_embeddings(t5, t5_tokenizer)
    pipe = FluxPipeline(
        scheduler=build_scheduler(),
        vae=vae,
        text_encoder=clip,
        tokenizer=clip_tokenizer,
        text_encoder_2=t5,
        tokenizer_2=t5_tokenizer,
        transformer=transformer,
    )
    pipe.to(torch.float16).save_pretrained(folder, safe_serialization=True)
    # transformers loads a model in the type that its config names, diffusers in float32 unless told otherwise. Naming
    # float32 here makes a plain `from_pretrained` give one type for the whole pipeline.
    for part in ("text_encoder", "text_encoder_2"):
        path = Path(folder, part, "config.json")
        config = json.loads(path.read_text())
        config.pop("torch_dtype", None)
        config["dtype"] = "float32"
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
