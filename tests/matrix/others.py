"""Transformers of sounds, of several kinds of tokens at once, and of what is no picture: small configs and calls."""

from __future__ import annotations

from typing import Any

import torch

from .driven import Entry
from .inputs import fixed, given, ints, ones, sample, several, text, time

WAVE = {"hidden_states": sample(1, 8, 16), "timestep": time(scale=0.001), "encoder_hidden_states": text(1, 6, 16)}


def _kv_cache() -> Any:
    from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache

    return WanAnimate2KVCache(3)


OTHERS: dict[str, Entry] = {
    "AceStepTransformer1DModel": Entry(
        {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "in_channels": 24,
            "audio_acoustic_hidden_dim": 8,
            "patch_size": 2,
            "sliding_window": 16,
        },
        {
            "hidden_states": sample(1, 8, 8),
            "timestep": time(scale=0.001),
            "timestep_r": time(scale=0.001),
            "encoder_hidden_states": text(1, 6, 32),
            "context_latents": fixed(1, 8, 16),
        },
    ),
    "Cosmos3OmniTransformer": Entry(
        {
            "head_dim": 6,
            "hidden_act": "relu2",
            "hidden_size": 12,
            "intermediate_size": 24,
            "latent_channel": 2,
            "latent_patch_size": 1,
            "num_attention_heads": 2,
            "num_hidden_layers": 3,
            "num_key_value_heads": 1,
            "patch_latent_dim": 2,
            "qk_norm_for_text": False,
            "rope_axes_dim": [1, 1, 1],
            "vocab_size": 32,
        },
        {
            "vision_tokens": sample(1, 2, 1, 2, 2, listed=True),
            "vision_timesteps": time(4),
            "input_ids": ints(32, 3),
            "text_indexes": torch.arange(3),
            "position_ids": torch.zeros(3, 7, dtype=torch.long),
            "und_len": 3,
            "sequence_length": 7,
            "vision_token_shapes": [(1, 2, 2)],
            "vision_sequence_indexes": torch.arange(3, 7),
            "vision_mse_loss_indexes": torch.arange(3, 7),
            "vision_noisy_frame_indexes": [torch.tensor([0])],
        },
    ),
    "LongCatAudioDiTTransformer": Entry(
        {"dit_dim": 64, "dit_depth": 3, "dit_heads": 4, "dit_text_dim": 16, "latent_dim": 8, "text_conv": False},
        {
            **WAVE,
            "hidden_states": sample(1, 16, 8),
            "encoder_attention_mask": ones(1, 6, dtype=torch.bool),
            "attention_mask": ones(1, 16, dtype=torch.bool),
        },
    ),
    "MiniMaxH3Transformer3DModel": Entry(
        {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "hidden_size": 24,
            "num_layers": 3,
            "num_refiner_layers": 2,
            "ffn_dim": 32,
            "in_channels": 4,
            "audio_in_channels": 6,
            "patch_size": (1, 2, 2),
            "text_dim": 8,
            "freq_dim": 8,
            "time_embed_hidden_dim": 24,
            "time_embed_dim": 16,
            "rope_freq_dim": 2,
        },
        {
            "hidden_states": sample(1, 8, 16),
            "audio_hidden_states": fixed(1, 6, 6),
            "encoder_hidden_states": text(1, 4, 8),
            "timestep": time(2, scale=0.001),
            "timestep_indices": torch.tensor([0] * 4 + [1] * 6 + [0] * 8),
            "token_tags": torch.tensor([1] * 4 + [2] * 6 + [0] * 8),
            "position_ids": torch.arange(18.0)[:, None].expand(18, 3),
            "text_indices": torch.arange(4),
            "audio_indices": torch.arange(4, 10),
            "video_indices": torch.arange(10, 18),
        },
    ),
    "MiniMaxMusic3Transformer1DModel": Entry(
        {
            "in_channels": 8,
            "condition_dim": 16,
            "num_layers": 3,
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "ff_inner_dim": 32,
            "rotary_dim": 4,
            "fourier_embedding_dim": 8,
        },
        {**WAVE, "encoder_hidden_states": text(1, 16, 16)},
    ),
    "StableAudioDiTModel": Entry(
        {
            "sample_size": 16,
            "in_channels": 8,
            "out_channels": 8,
            "num_layers": 3,
            "attention_head_dim": 8,
            "num_attention_heads": 4,
            "num_key_value_attention_heads": 2,
            "cross_attention_dim": 16,
            "time_proj_dim": 16,
            "global_states_input_dim": 8,
            "cross_attention_input_dim": 16,
        },
        {
            **WAVE,
            "timestep": time(),
            "global_hidden_states": text(1, 1, 8),
            "rotary_embedding": several(fixed(17, 4), fixed(17, 4)),
        },
    ),
    "StableAudio3DiTModel": Entry(
        {
            "io_channels": 8,
            "patch_size": 1,
            "embed_dim": 32,
            "depth": 3,
            "num_heads": 4,
            "cond_token_dim": 16,
            "global_cond_dim": 12,
            "local_add_cond_dim": 5,
            "timestep_features_dim": 16,
            "ff_mult": 2,
            "num_memory_tokens": 3,
            "use_differential_attention": False,
        },
        {**WAVE, "global_hidden_states": text(1, 12)},
    ),
    "WanAnimate2Transformer3DModel": Entry(
        {
            "patch_size": (1, 2, 2),
            "text_len": 8,
            "in_dim": 36,
            "out_dim": 16,
            "dim": 128,
            "ffn_dim": 64,
            "freq_dim": 32,
            "text_dim": 16,
            "num_heads": 4,
            "num_layers": 3,
            "cross_attn_norm": True,
            "use_img_emb": True,
        },
        {
            "hidden_states": sample(16, 2, 4, 4, listed=True),
            "timestep": time(),
            "encoder_hidden_states": several(text(6, 16)),
            "condition_latents": several(fixed(20, 2, 4, 4)),
            "encoder_hidden_states_image": fixed(1, 4, 1280),
            "kv_cache": given(_kv_cache),
            "kv_cache_mode": "extract",
            "seq_len": 8,
            "offset_grid_sizes": torch.tensor([[2, 2, 2]]),
        },
    ),
    "SanaWMTransformer3DModel": Entry(
        {
            "in_channels": 4,
            "num_layers": 4,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "softmax_every_n": 2,
            "linear_head_dim": 16,
            "caption_channels": 16,
            "image_size": 32,
            "use_chunk_plucker_post_attn": False,
            "fp32_attention": False,
        },
        {
            "hidden_states": sample(1, 4, 2, 4, 4),
            "timestep": time(1, 1, 2),
            "encoder_hidden_states": text(1, 1, 6, 16),
            "encoder_attention_mask": ones(1, 6),
        },
    ),
    "RFD4ProteinaTransformer": Entry(
        {
            "nlayers": 3,
            "token_dim": 16,
            "nheads": 2,
            "dim_cond": 8,
            "pair_repr_dim": 8,
            "latent_dim": 4,
            "t_emb_dim": 8,
            "feats_seq": ("xt_bb_ca", "xt_local_latents"),
            "feats_cond_seq": ("time_emb_bb_ca", "time_emb_local_latents"),
            "feats_pair_repr": ("xt_bb_ca_pair_dists",),
            "tri_mult_c": 8,
        },
        {
            "bb_ca": sample(1, 6, 3),
            "bb_ca_time": time(scale=0.001),
            "local_latents": fixed(1, 6, 4),
            "local_latents_time": time(scale=0.001),
            "padding_mask": ones(1, 6, dtype=torch.bool),
            "conditioning": {
                "is_in_context_conditioning": torch.zeros(1, 6),
                "supports_local_latent": torch.ones(1, 6),
            },
        },
        branches=1,
    ),
    "Transformer2DModel": Entry(
        {
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "in_channels": 4,
            "num_layers": 3,
            "norm_num_groups": 2,
            "cross_attention_dim": 16,
        },
        {"hidden_states": sample(1, 4, 8, 8), "timestep": time(), "encoder_hidden_states": text(1, 6, 16)},
    ),
    "DreamLiteTransformer2DModel": Entry(
        {
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "in_channels": 4,
            "num_layers": 3,
            "norm_num_groups": 2,
            "cross_attention_dim": 16,
            "use_linear_projection": True,
        },
        {"hidden_states": sample(1, 4, 8, 8), "timestep": time(), "encoder_hidden_states": text(1, 6, 16)},
    ),
    "TransformerTemporalModel": Entry(
        {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "num_layers": 3, "norm_num_groups": 2},
        {"hidden_states": sample(2, 4, 8, 8), "timestep": time(), "num_frames": 2},
        branches=1,
    ),
}
