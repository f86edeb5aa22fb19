"""Transformers of pictures: a small config, and what one call takes."""

from __future__ import annotations

import torch

from .driven import Entry
from .inputs import fixed, full, given, grid_ids, ints, ones, sample, several, text, time, zeros

FLUX_LIKE = {
    "patch_size": 1,
    "in_channels": 4,
    "num_layers": 2,
    "num_single_layers": 3,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "axes_dims_rope": (4, 4, 8),
}
FLUX_LIKE_CALL = {
    "hidden_states": sample(1, 16, 4),
    "encoder_hidden_states": text(1, 6, 32),
    "timestep": time(scale=0.001),
    "img_ids": given(lambda: grid_ids(0, 4, 4)),
    "txt_ids": zeros(6, 3),
}
PICTURE = {"hidden_states": sample(1, 4, 8, 8), "timestep": time(), "encoder_hidden_states": text(1, 6, 8)}
SIZES = {name: full(64, 1, 2) for name in ("original_size", "target_size")} | {"crop_coords": zeros(1, 2)}


def _packed_positions() -> torch.Tensor:
    ids = grid_ids(4, 2, 2, batched=True).long()
    ids[:, 4:] += 65536
    return ids


def _packed_kinds() -> torch.Tensor:
    from diffusers.models.transformers.transformer_ideogram4 import LLM_TOKEN_INDICATOR, OUTPUT_IMAGE_INDICATOR

    return torch.tensor([[LLM_TOKEN_INDICATOR] * 4 + [OUTPUT_IMAGE_INDICATOR] * 4])


IMAGES: dict[str, Entry] = {
    "BriaTransformer2DModel": Entry(
        {**FLUX_LIKE, "pooled_projection_dim": None, "axes_dims_rope": (0, 8, 8)}, FLUX_LIKE_CALL
    ),
    "BriaFiboTransformer2DModel": Entry(
        {**FLUX_LIKE, "text_encoder_dim": 16, "pooled_projection_dim": None, "axes_dims_rope": (0, 8, 8)},
        {**FLUX_LIKE_CALL, "text_encoder_layers": several(*[text(1, 6, 16)] * 5)},
    ),
    "BriaFibo2Transformer2DModel": Entry(
        {
            "in_channels": 4,
            "patch_size": 2,
            "dim": 32,
            "n_layers": 3,
            "n_refiner_layers": 2,
            "n_heads": 2,
            "cap_feat_dim": 16,
            "injection_layer_ids": (1,),
            "perceiver_num_layers": 1,
            "min_num_gist_tokens": 2,
            "max_num_gist_tokens": 4,
            "gist_step": 1,
            "gist_min_text_len": 2,
            "gist_max_text_len": 8,
            "axes_dims": (4, 6, 6),
            "axes_lens": (64, 32, 32),
        },
        {**PICTURE, "timestep": time(scale=0.001), "encoder_hidden_states": text(1, 2, 6, 16)},
    ),
    "CogView3PlusTransformer2DModel": Entry(
        {
            "patch_size": 2,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 3,
            "attention_head_dim": 4,
            "num_attention_heads": 2,
            "text_embed_dim": 8,
            "time_embed_dim": 8,
            "condition_dim": 2,
            "pos_embed_max_size": 8,
            "sample_size": 8,
        },
        {**PICTURE, **SIZES},
    ),
    "DiTTransformer2DModel": Entry(
        {
            "in_channels": 4,
            "out_channels": 8,
            "num_attention_heads": 2,
            "attention_head_dim": 4,
            "num_layers": 3,
            "num_embeds_ada_norm": 10,
            "patch_size": 2,
            "sample_size": 8,
        },
        {"hidden_states": sample(1, 4, 8, 8), "timestep": time(), "class_labels": ints(10, 1)},
    ),
    "ErnieImageTransformer2DModel": Entry(
        {
            "hidden_size": 32,
            "num_attention_heads": 2,
            "num_layers": 3,
            "ffn_hidden_size": 32,
            "in_channels": 8,
            "out_channels": 8,
            "patch_size": 1,
            "text_in_dim": 16,
            "rope_axes_dim": (8, 4, 4),
        },
        {
            "hidden_states": sample(1, 8, 4, 4),
            "timestep": time(),
            "text_bth": text(1, 6, 16),
            "text_lens": full(6, 1, dtype=torch.long),
        },
    ),
    "Flux3Transformer2DModel": Entry(
        {
            "in_channels": 8,
            "cond_in_channels": 8,
            "num_layers": 2,
            "num_single_layers": 3,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 32,
            "timestep_channels": 32,
            "axes_dims_rope": (4, 4, 4, 4),
        },
        {
            "hidden_states": sample(1, 16, 8),
            "encoder_hidden_states": text(1, 6, 32),
            "timestep": time(scale=0.001),
            "img_ids": given(lambda: grid_ids(0, 4, 4, axes=4)),
            "txt_ids": zeros(6, 4),
        },
    ),
    "GlmImageTransformer2DModel": Entry(
        {
            "patch_size": 2,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 3,
            "attention_head_dim": 8,
            "num_attention_heads": 2,
            "text_embed_dim": 8,
            "time_embed_dim": 16,
            "condition_dim": 8,
            "prior_vq_quantizer_codebook_size": 64,
        },
        {
            **PICTURE,
            "prior_token_id": ints(64, 1, 16),
            "prior_token_drop": zeros(1, 16, dtype=torch.bool),
            "target_size": full(64, 1, 2),
            "crop_coords": zeros(1, 2),
        },
    ),
    "Ideogram4Transformer2DModel": Entry(
        {
            "in_channels": 8,
            "num_layers": 3,
            "attention_head_dim": 8,
            "num_attention_heads": 4,
            "intermediate_size": 32,
            "adaln_dim": 16,
            "llm_features_dim": 24,
            "mrope_section": (2, 1, 1),
        },
        {
            "hidden_states": sample(1, 8, 8),
            "timestep": time(scale=0.001),
            "encoder_hidden_states": text(1, 8, 24),
            "position_ids": given(_packed_positions),
            "segment_ids": ones(1, 8, dtype=torch.long),
            "indicator": given(_packed_kinds),
        },
    ),
    "JoyImageEditTransformer3DModel": Entry(
        {
            "patch_size": [1, 2, 2],
            "in_channels": 4,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "text_dim": 16,
            "num_layers": 3,
            "rope_dim_list": [4, 6, 6],
        },
        {
            "hidden_states": sample(1, 4, 2, 4, 4),
            "timestep": time(),
            "encoder_hidden_states": text(1, 6, 16),
        },
    ),
    "JoyImageEditPlusTransformer3DModel": Entry(
        {
            "patch_size": [1, 2, 2],
            "in_channels": 4,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "text_dim": 16,
            "num_layers": 3,
            "rope_dim_list": [4, 6, 6],
        },
        {
            "hidden_states": sample(1, 8, 4, 1, 2, 2),
            "timestep": time(),
            "encoder_hidden_states": text(1, 6, 16),
            "shape_list": [[(1, 2, 2), (1, 2, 2)]],
        },
    ),
    "Krea2Transformer2DModel": Entry(
        {
            "in_channels": 8,
            "num_layers": 3,
            "attention_head_dim": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 32,
            "timestep_embed_dim": 8,
            "text_hidden_dim": 16,
            "num_text_layers": 3,
            "text_num_attention_heads": 2,
            "text_num_key_value_heads": 1,
            "text_intermediate_size": 16,
            "num_layerwise_text_blocks": 1,
            "num_refiner_text_blocks": 1,
            "axes_dims_rope": (4, 2, 2),
        },
        {
            "hidden_states": sample(1, 16, 8),
            "encoder_hidden_states": text(1, 6, 3, 16),
            "timestep": time(scale=0.001),
            "position_ids": given(lambda: grid_ids(6, 4, 4)),
            "encoder_attention_mask": ones(1, 6, dtype=torch.bool),
        },
    ),
    "LongCatImageTransformer2DModel": Entry(
        {**FLUX_LIKE, "pooled_projection_dim": 32}, {**FLUX_LIKE_CALL, "guidance": full(3.5, 1)}
    ),
    "LuminaNextDiT2DModel": Entry(
        {
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "hidden_size": 24,
            "num_layers": 3,
            "num_attention_heads": 3,
            "num_kv_heads": 1,
            "multiple_of": 16,
            "learn_sigma": False,
            "cross_attention_dim": 8,
        },
        {
            **PICTURE,
            "timestep": time(scale=0.001),
            "encoder_mask": ones(1, 6),
            "image_rotary_emb": fixed(384, 384, 4),
            "cross_attention_kwargs": {},
        },
    ),
    "NucleusMoEImageTransformer2DModel": Entry(
        {
            "patch_size": 2,
            "in_channels": 16,
            "out_channels": 4,
            "num_layers": 3,
            "attention_head_dim": 16,
            "num_attention_heads": 4,
            "joint_attention_dim": 16,
            "axes_dims_rope": (8, 4, 4),
            "moe_enabled": False,
            "capacity_factors": [8.0] * 3,
        },
        {
            "hidden_states": sample(1, 16, 16),
            "encoder_hidden_states": text(1, 6, 16),
            "encoder_hidden_states_mask": ones(1, 6, dtype=torch.long),
            "timestep": time(scale=0.001),
            "img_shapes": [(1, 4, 4)],
        },
    ),
    "OmniGenTransformer2DModel": Entry(
        {
            "hidden_size": 16,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "intermediate_size": 32,
            "num_layers": 3,
            "pad_token_id": 0,
            "vocab_size": 100,
            "in_channels": 4,
            "time_step_dim": 4,
            "rope_scaling": {"long_factor": [1] * 4, "short_factor": [1] * 4},
        },
        {
            "hidden_states": sample(1, 4, 8, 8),
            "timestep": time(scale=0.001),
            "input_ids": ints(100, 1, 22),
            "input_img_latents": several(fixed(1, 4, 8, 8)),
            "input_image_sizes": {0: [[0, 16]]},
            "attention_mask": ones(1, 39, 39),
            "position_ids": given(lambda: torch.arange(39)[None]),
        },
    ),
    "OvisImageTransformer2DModel": Entry({**FLUX_LIKE, "out_channels": 4}, FLUX_LIKE_CALL),
    "PRXTransformer2DModel": Entry(
        {
            "in_channels": 4,
            "patch_size": 2,
            "context_in_dim": 16,
            "hidden_size": 32,
            "num_heads": 2,
            "depth": 3,
            "axes_dim": [8, 8],
        },
        {**PICTURE, "timestep": time(scale=0.001), "encoder_hidden_states": text(1, 6, 16)},
    ),
    "PriorTransformer": Entry(
        {
            "num_attention_heads": 2,
            "attention_head_dim": 4,
            "num_layers": 3,
            "embedding_dim": 8,
            "num_embeddings": 7,
            "additional_embeddings": 4,
        },
        {
            "hidden_states": sample(1, 8),
            "timestep": time(),
            "proj_embedding": text(1, 8),
            "encoder_hidden_states": text(1, 7, 8),
        },
    ),
    "QwenImage21Transformer2DModel": Entry(
        {
            "patch_size": 1,
            "in_channels": 8,
            "out_channels": 8,
            "num_layers": 3,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "context_in_dim": 16,
            "axes_dims_rope": (8, 4, 4),
        },
        {
            "hidden_states": sample(1, 16, 8),
            "encoder_hidden_states": text(1, 6, 16),
            "timestep": time(scale=0.001),
            "img_shapes": [[(1, 4, 4)]],
            "img_mask": torch.arange(10)[None] >= 6,
            "encoder_hidden_states_mask": ones(1, 6, dtype=torch.bool),
        },
    ),
}
