"""Tiny configurations of transformers' families, each with the layers that set it apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

PLAIN = {
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LINEAR_ATTENTION = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 6,
}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT = {
    "q_lora_rank": 12,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "head_dim": 4,
}
MAMBA = {"mamba_d_ssm": 48, "mamba_n_heads": 4, "mamba_d_head": 12, "mamba_d_state": 8}
SMALL: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "qwen3_next": {**LINEAR_ATTENTION, **EXPERTS},
    "qwen3_5_text": LINEAR_ATTENTION,
    "gemma2": {},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "gpt_oss": {**EXPERTS, "layer_types": ["sliding_attention", "full_attention"]},
    "glm4": {},
    "glm4_moe": EXPERTS,
    "deepseek_v3": {**EXPERTS, **LATENT},
    "olmo2": {},
    "phi3": {},
    "phi": {"num_key_value_heads": 4},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 12,
        "ssm_state_size": 8,
        "n_groups": 1,
        "num_hidden_layers": 2,
    },
    "falcon_h1": MAMBA,
    "mamba2": {"num_heads": 4, "head_dim": 12, "state_size": 8, "n_groups": 1, "expand": 2},
    "gpt2": {"n_embd": 24, "n_head": 4, "n_layer": 2, "n_positions": 64},
    "opt": {"ffn_dim": 40, "word_embed_proj_dim": 24},
    "bloom": {"n_head": 4, "n_layer": 2},
    "gpt_neox": {},
    "mixtral": EXPERTS,
    "cohere2": {},
    "granitemoehybrid": {
        **EXPERTS,
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 4,
        "mamba_d_head": 12,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "shared_intermediate_size": 16,
    },
}
"""By model type, what differs from PLAIN."""


def small(family: str) -> dict[str, Any]:
    """The ``config.json`` object of a family's tiny model."""
    return {**PLAIN, "model_type": family, **SMALL[family]}


def small_model(family: str, folder: Path | None = None, seed: int = 0) -> Any:
    """A tiny model with random parameters, also biases and norms; saved in ``folder`` if given."""
    values = small(family)
    config = AutoConfig.for_model(**values)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter += 0.1 * noise
            elif "conv" not in name:
                parameter.copy_(0.2 * noise)
    if folder is not None:
        model.save_pretrained(folder)
    return model
