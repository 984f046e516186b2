"""Config values that single architectures need in addition to the general shrinking, and the few that cannot be built."""

from __future__ import annotations

from typing import Any

HYBRID = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
VIBEVOICE = {"num_filters": 4, "downsampling_ratios": [2, 2, 2], "depths": [1, 1, 1, 1]}
INDEX = {"index_n_heads": 32}  # of few, each cut off at zero, several scores are exactly zero: a choice among equals
DOTS3_NOTE = {
    **INDEX,
    "qk_nope_head_dim": 8,
    "head_dim": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 24,
    "swa_kv_lora_rank": 24,
    "swa_head_dim": 16,
    "swa_qk_nope_head_dim": 8,
    "swa_v_head_dim": 16,
}

# By model type or by entry id; a nested dictionary amends a nested config.
CORRECTIONS: dict[str, dict[str, Any]] = {
    "axk2": INDEX,
    "bamba": {"attn_layer_indices": [1, 3]},
    "bit": {"num_groups": 4},
    "blenderbot": {"encoder_layers": 4},
    "bloom": {"n_layer": 4},
    "blt": {"num_hidden_layers": 4},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {**ROPE, "mrope_section": [4, 2, 2]}}},
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_v32": INDEX,
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "donut-swin": {"window_size": 2},
    "dots3_note_text": DOTS3_NOTE,
    "dots3_note": {
        "text_config": DOTS3_NOTE,
        "vision_config": {"pyramid_num_routed": [-1, -1, 4, 4], "adapter_in_dim": 64},
        "audio_config": {"adapter_input_size": 64},
    },
    "efficientnet": {
        "batch_norm_eps": 1e-6,
        "width_coefficient": 0.1,
        "depth_coefficient": 1.0,
        "in_channels": [32, 16, 24, 40, 80, 112, 192],
        "out_channels": [16, 24, 40, 80, 112, 192, 320],
        "hidden_dim": 128,
    },
    "encoder-decoder": {
        "encoder": {"model_type": "bert"},
        "decoder": {"model_type": "bert", "is_decoder": True, "add_cross_attention": True},
    },
    "esm": {"vocab_size": 99, "pad_token_id": 1, "mask_token_id": 4},
    "gemma4_assistant": {
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
        },
    },
    "gemma4_unified": {"text_config": {"global_head_dim": 32}},
    "gemma4_unified_text": {"global_head_dim": 32},
    "gemma4_unified_assistant": {
        "text_config": {
            "model_type": "gemma4_unified_text",
            "global_head_dim": 32,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        }
    },
    "glm_moe_dsa": INDEX,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": HYBRID},
    "hgnet_v2": {
        "stem_channels": [3, 16, 16],
        "stage_in_channels": [16, 32, 48, 64],
        "stage_mid_channels": [16, 16, 32, 32],
        "stage_out_channels": [32, 48, 64, 64],
        "hidden_sizes": [32, 48, 64, 64],
    },
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"head_dim": 32},
    "ministral": {"head_dim": 16},
    "mobilenet_v1": {"depth_multiplier": 0.25},
    "mobilebert": {"embedding_size": 32},
    "musicgen": {
        "text_encoder": {"model_type": "t5"},
        "audio_encoder": {"model_type": "encodec"},
        "decoder": {"model_type": "musicgen_decoder"},
    },
    "musicgen_melody": {
        "text_encoder": {"model_type": "t5"},
        "audio_encoder": {"model_type": "encodec"},
        "decoder": {"model_type": "musicgen_melody_decoder"},
    },
    "nemo_speechlm": {"text_config": {"hybrid_override_pattern": "ME*M"}},
    "nemotron": {"num_key_value_heads": 2},
    "perceiver": {"num_cross_attention_heads": 1, "image_size": 32},
    "phi4_multimodal": {
        "audio_config": {"num_blocks": 2, "nemo_conv_channels": 64, "ext_pw_out_channel": 64, "depthwise_separable_out_channel": 64}
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "reformer": {
        "axial_pos_embds_dim": [32, 32],
        "axial_pos_shape": [8, 8],
        "attn_layers": ["local", "lsh"] * 2,
        "hash_seed": 0,
        "num_buckets": 4,
    },
    "shieldgemma2": {"mm_tokens_per_image": 4, "yes_token_index": 20, "no_token_index": 30},
    "swin": {"window_size": 2},
    "swinv2": {"window_size": 2},
    "textnet": {"stem_out_channels": 16},
    "vibevoice_asr": {
        "acoustic_tokenizer_encoder_config": VIBEVOICE,
        "semantic_tokenizer_encoder_config": VIBEVOICE,
        "acoustic_tokenizer_chunk_size": 32,
    },
    "causal/xlm": {"causal": True},
    "xlstm": {"chunk_size": 64, "qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
}
CORRECTIONS["qwen4_exp"] = {"text_config": CORRECTIONS["qwen4_exp_text"]}
UNBUILDABLE: dict[str, str] = {
    "causal/gemma3n": "its vision tower is a timm model, and timm is not installed",
    "causal/gemma4_assistant": "its config wants every layer to read shared keys and values, which its text config refuses",
    "image/dinat": "neighbourhood attention lives in the natten package, which is not installed",
    "image/timm_wrapper": "the model itself comes from timm, which is not installed",
}
