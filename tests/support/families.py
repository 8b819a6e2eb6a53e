"""Tiny configurations of the families of causal language models that transformers has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY: Final = 32
ENCODERS: Final = frozenset(
    (
        "bart",
        "bert",
        "bert-generation",
        "big_bird",
        "bigbird_pegasus",
        "blenderbot",
        "blenderbot-small",
        "camembert",
        "data2vec-text",
        "electra",
        "ernie",
        "marian",
        "mbart",
        "megatron-bert",
        "mvp",
        "pegasus",
        "plbart",
        "prophetnet",
        "reformer",
        "rembert",
        "roberta",
        "roberta-prelayernorm",
        "roc_bert",
        "roformer",
        "trocr",
        "whisper",
        "xlm",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xlnet",
        "xmod",
    )
)
"""Encoders, and decoders of encoder-decoder models, which transformers also lists as causal."""
COMMON: Final[Mapping[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "initializer_range": 0.2,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
"""Sizes by field, including names that only some families of transformers use."""
OTHERS: Final[Mapping[str, Any]] = {
    "conv_L_cache": 3,
    "dense_intermediate_size": 48,
    "expert_ffn_hidden_size": 16,
    "ffn_dim": 48,
    "first_k_dense_replace": 1,
    "full_attn_idxs": None,
    "hidden_size_per_layer_input": 8,
    "index_head_dim": 8,
    "index_n_heads": 16,
    "index_topk": 8,
    "kv_lora_rank": 16,
    "linear_head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_num_heads": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 8,
    "mamba_chunk_size": 8,
    "mamba_d_head": 16,
    "mamba_d_ssm": 64,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_n_heads": 4,
    "moe_intermediate_size": 16,
    "moe_latent_size": None,
    "moe_shared_expert_intermediate_size": 16,
    "n_group": 1,
    "n_routed_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "o_lora_rank": 8,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "rel_extent": 16,
    "shared_expert_intermediate_size": 16,
    "shared_experts_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "sliding_window": 6,
    "sliding_window_size": 6,
    "topk_group": 1,
    "unpadded_vocab_size": VOCABULARY,
    "v_head_dim": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    "zero_expert_num": 2,
}
"""Sizes of parts that only some families have; they apply to fields with a default."""
OWN: Final[Mapping[str, Mapping[str, Any]]] = {
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2},
    "bailing_hybrid": {"num_expert_group": 1, "num_experts_per_token": 2},
    "bamba": {"attn_layer_indices": [1]},
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0}
            for kind in ("sliding_attention", "full_attention")
        },
    },
    "cpmant": {
        "dim_ff": 48,
        "dim_head": 8,
        "position_bias_max_distance": 64,
        "position_bias_num_buckets": 32,
    },
    "ctrl": {"dff": 48},
    "cwm": {"bos_token_id": 0, "eos_token_id": 0},
    "dbrx": {
        "attn_config": {"clip_qkv": 8.0, "kv_n_heads": 2, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_v4": {"num_key_value_heads": 1, "o_groups": 2, "head_dim": 16},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": {"head_dim": 16, "num_key_value_heads": 4, "per_layer_config": None},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2},
    "gemma3n_text": {
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
    },
    "gemma4_text": {"global_head_dim": 16},
    "gemma4_unified_text": {"global_head_dim": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 6},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hrm_text": {"num_layers_per_stack": 1, "H_cycles": 2, "L_cycles": 1, "num_hidden_layers": 4},
    "inkling2_text": {
        "swa_head_dim": 8,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
    },
    "inkling_text": {"swa_head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2},
    "jamba": {"num_hidden_layers": 3, "attn_layer_offset": 1, "attn_layer_period": 2},
    "kimi_linear": {"num_experts_per_token": 2, "num_key_value_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"moe_topk": 2, "num_layers": 2},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    "modernbert-decoder": {
        "bos_token_id": 0,
        "cls_token_id": 0,
        "eos_token_id": 0,
        "sep_token_id": 0,
        "local_attention": 12,
        "pad_token_id": 0,
    },
    "nemotron_h": {
        "chunk_size": 8,
        "mamba_head_dim": 8,
        "mamba_num_heads": 4,
        "n_groups": 1,
        "ssm_state_size": 8,
    },
    "qwen4_exp_text": {
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "indexer_head_dim": 8,
        "indexer_kv_heads": 1,
        "indexer_n_heads": 2,
        "hc_lowrank": 8,
        "ngram_vocab_size_base": 64,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 1,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "xglm": {"decoder_start_token_id": 0, "d_model": 32, "attention_heads": 4, "num_layers": 2},
    "zamba": {
        "attention_head_dim": 16,
        "attention_hidden_size": 64,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "num_hidden_layers": 4,
        "mamba_dt_rank": 4,
        "num_key_value_heads": 4,
    },
    "zamba2": {
        "chunk_size": 8,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "num_hidden_layers": 4,
        "mamba_headdim": 8,
        "num_key_value_heads": 4,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}
"""Fields of one family: sizes that must match each other, and one layer of each kind."""


def families() -> list[str]:
    """Return every causal language model of transformers that reads and writes only text."""
    return [
        name
        for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        if name not in ENCODERS and not _composite(name)
    ]


def _composite(name: str) -> bool:
    """Return whether the family has towers (for pictures, say) or only assists another family."""
    parts = CONFIG_MAPPING[name].sub_configs
    return name.endswith("_assistant") or any("attn" not in k and "ffn" not in k for k in parts)


def tiny(name: str, **changes: Any) -> dict[str, Any]:
    """Return the ``config.json`` object of a model with one or two layers of each kind.

    ``changes`` are other values of fields.

    Raises KeyError if this version of transformers does not have the family.
    """
    kind = CONFIG_MAPPING[name]
    defaults = kind().to_dict()
    known = set(defaults) | set(kind.attribute_map)
    values: dict[str, Any] = {key: value for key, value in COMMON.items() if key in known}
    values |= {key: value for key, value in OTHERS.items() if defaults.get(key) is not None}
    values |= {key: None for key in defaults if key.endswith("_token_id")}
    if values.get("kv_lora_rank"):  # latent attention has no groups of heads
        values["num_key_value_heads"] = COMMON["num_attention_heads"]
    if kinds := list(dict.fromkeys(defaults.get("layer_types") or ())):
        kinds = kinds if len(kinds) > 1 else kinds * 2
        values |= {"layer_types": kinds, "num_hidden_layers": len(kinds)}
    values |= OWN.get(name, {}) | changes
    return AutoConfig.for_model(name, **values).to_dict()


def tiny_model(name: str, folder: Path | None = None, seed: int = 0, **changes: Any) -> Any:
    """Return a model of `tiny` with random parameters, also biases and norms.

    If ``folder`` is given, save the model there.
    """
    config = AutoConfig.for_model(**tiny(name, **changes))
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter += 0.1 * noise
            elif "conv" not in key:
                parameter.copy_(0.2 * noise)
    if folder is not None:
        model.save_pretrained(folder)
    return model
