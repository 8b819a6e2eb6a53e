"""Tiny configs of model families of transformers, with weights large enough to tell apart."""

from __future__ import annotations

from typing import Any

BASE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
WINDOWS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
MAMBA2 = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
    "mamba_n_groups": 1,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
NARROW = {key: BASE[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers")}

APART: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 6},
    "gemma2": {"sliding_window": 6, "query_pre_attn_scalar": 8},
    "gemma3_text": {**WINDOWS, "query_pre_attn_scalar": 8},
    "gemma4_text": {
        **WINDOWS,
        "global_head_dim": 8,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 64,
    },
    "qwen3_moe": EXPERTS,
    "olmo3": WINDOWS,
    "glm4_moe": EXPERTS,
    "deepseek_v3": {**EXPERTS, **LATENT},
    "llama4_text": {
        **EXPERTS,
        "intermediate_size_mlp": 48,
        "attention_chunk_size": 6,
        "attn_temperature_tuning": False,  # it scales by column, so rows would not be packed
        "layer_types": ["chunked_attention", "full_attention"],
        "moe_layers": [1],
    },
    "cohere2": WINDOWS,
    "granite": {},
    "minimax_m2": EXPERTS,
    "phi3": {"pad_token_id": 0},
    "gpt2": GPT2,
    "gpt_neox": {},
}
"""Families whose sequences can share a row."""
MIXING: dict[str, dict[str, Any]] = {
    "qwen3_next": {**EXPERTS, **DELTA},
    "qwen3_5_text": {
        **DELTA,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [1, 1, 0],
            "mrope_interleaved": True,
        },
    },
    "olmo_hybrid": DELTA,
    "nemotron_h": {
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "attention", "mlp"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "chunk_size": 8,
        "n_groups": 1,
    },
    "falcon_h1": {**MAMBA2, "mamba_d_ssm": 32, "mamba_d_head": 8},
    "bamba": {**MAMBA2, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **EXPERTS,
        **MAMBA2,
        "shared_intermediate_size": 16,
        "layer_types": ["mamba", "attention"],
    },
    "jamba": {
        **EXPERTS,
        "mamba_d_state": 8,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "mamba": {**NARROW, "state_size": 8},
    "mamba2": {
        **NARROW,
        "state_size": 8,
        "num_heads": 4,
        "head_dim": 16,
        "n_groups": 1,
        "chunk_size": 8,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 48, "init_std": 0.2},
    "bloom": {"n_layer": 2, "n_head": 4},
}
"""Families whose sequences would see each other in a row, or have wrong positions in it."""
UNEVEN: dict[str, dict[str, Any]] = {
    "biogpt": {"pad_token_id": 0},
    "zamba2": {
        "num_hidden_layers": 4,
        "attention_head_dim": 16,
        "attention_hidden_size": 64,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "hybrid_layer_ids": [1, 3],
        "mamba_d_state": 8,
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
        "mamba_ngroups": 1,
        "chunk_size": 8,
        "num_mem_blocks": 1,
        "adapter_rank": 4,
    },
}
"""Families without names of blocks, and with a block that several layers share."""
ONLY_TRAINING: dict[str, dict[str, Any]] = {
    "recurrent_gemma": {
        "num_hidden_layers": 3,
        "lru_width": 32,
        "attention_window_size": 6,
        "block_types": ["recurrent", "recurrent", "attention"],
        "pad_token_id": 0,
    },
}
"""Families that mix sequences and cannot generate."""


def family_config(name: str, **changes: Any) -> dict[str, Any]:
    """Return the config of a family, with ``changes``."""
    values = {**APART, **MIXING, **UNEVEN, **ONLY_TRAINING}[name]
    return {**BASE, **values, "model_type": name, **changes}
