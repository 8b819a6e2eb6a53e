"""Pairs of the built-in decoder and transformers' model with the same random weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from slurmrl.engines.role_weights import init_tensor
from slurmrl.models.architecture import ModelConfig
from slurmrl.models.decoder import Decoder, build
from tests.support.decoder_folders import from_hf

BASE = {
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,  # transformers gives the embedding of a padding token no gradient
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "head_dim": 6,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 7,
    "qk_rope_head_dim": 6,
    "v_head_dim": 5,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 10,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LITE = {name: value for name, value in DEEPSEEK.items() if name != "first_k_dense_replace"}
LITE |= {"model_type": "glm4_moe_lite", "q_lora_rank": 10}
ODD: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-one-kv-head": {"model_type": "llama", "num_key_value_heads": 1},
    "llama-wide-heads": {"model_type": "llama", "head_dim": 20, "tie_word_embeddings": True},
    "llama-no-grouping": {"model_type": "llama", "num_key_value_heads": 4},
    "llama-linear-rope": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 300.0, "factor": 3.0},
    },
    "llama-llama3-rope": {"model_type": "llama", "head_dim": 16, "rope_parameters": LLAMA3},
    "llama-old-rope-fields": {
        "model_type": "llama",
        "rope_theta": 700.0,
        "rope_scaling": {"type": "linear", "factor": 2.0},
    },
    "llama-gelu": {"model_type": "llama", "hidden_act": "gelu_pytorch_tanh"},
    "qwen2": {"model_type": "qwen2"},
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    "qwen2-odd-hidden": {"model_type": "qwen2", "hidden_size": 27, "num_key_value_heads": 1},
    "qwen2-yarn": {"model_type": "qwen2", "head_dim": 16, "rope_parameters": YARN},
    "deepseek-coder": {
        "model_type": "llama",
        "num_key_value_heads": 4,
        "rope_theta": 100000,
        "rope_scaling": {"type": "linear", "factor": 4.0},
    },
    "llama-dynamic-rope": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 300.0, "factor": 3.0},
    },
    "qwen2-windows": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
    },
    "qwen3-layer-types": {
        "model_type": "qwen3",
        "use_sliding_window": True,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3": {"model_type": "qwen3"},
    "qwen3-biases": {"model_type": "qwen3", "attention_bias": True, "num_key_value_heads": 4},
    "qwen3-wide-heads": {"model_type": "qwen3", "head_dim": 32, "num_key_value_heads": 1},
    "qwen3-yarn-factors": {
        "model_type": "qwen3",
        "head_dim": 12,
        "rope_parameters": {
            **YARN,
            "beta_fast": 16,
            "beta_slow": 2,
            "truncate": False,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
        },
    },
    "mistral": {"model_type": "mistral", "sliding_window": 7},
    "mistral-no-window": {"model_type": "mistral", "sliding_window": None, "head_dim": 10},
    "mistral-window-of-one": {"model_type": "mistral", "sliding_window": 1},
    "gemma": {"model_type": "gemma"},
    "gemma-one-kv-head": {
        "model_type": "gemma",
        "num_key_value_heads": 1,
        "head_dim": 16,
        "attention_bias": True,
    },
    "gemma-untied-old-act": {
        "model_type": "gemma",
        "tie_word_embeddings": False,
        "hidden_act": "gelu",
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4},
    "mixtral-windows": {
        "model_type": "mixtral",
        "num_local_experts": 3,
        "num_experts_per_tok": 1,
        "sliding_window": 4,
        "intermediate_size": 10,
        "tie_word_embeddings": True,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 12,
    },
    "qwen3_moe-some-dense": {
        "model_type": "qwen3_moe",
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 14,
        "norm_topk_prob": True,
        "num_hidden_layers": 4,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [1],
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 6,
    },
    "glm4_moe": {
        "model_type": "glm4_moe",
        "n_routed_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 12,
        "head_dim": 12,
    },
    "solar_open": {
        "model_type": "solar_open",
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "partial_rotary_factor": 1.0,
    },
    "glm4_moe-groups": {
        "model_type": "glm4_moe",
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 10,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 2,
        "num_hidden_layers": 4,
        "first_k_dense_replace": 2,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.7,
        "use_qk_norm": True,
        "attention_bias": True,
        "rope_scaling": {**YARN, "partial_rotary_factor": 0.75},
        "head_dim": 16,
    },
    "deepseek_v3": {
        **DEEPSEEK,
        "n_group": 4,
        "topk_group": 2,
        "q_lora_rank": 10,
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
    },
    "deepseek_v3-plain-queries": {
        **DEEPSEEK,
        "q_lora_rank": None,
        "v_head_dim": 16,
        "rope_interleave": False,
        "num_hidden_layers": 4,
        "first_k_dense_replace": 2,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "rms_norm_eps": 1e-3,
    },
    "deepseek_v3-biases": {**DEEPSEEK, "q_lora_rank": 9, "attention_bias": True},
    "gpt_oss": {
        "model_type": "gpt_oss",
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "intermediate_size": 12,
        "sliding_window": 5,
        "num_hidden_layers": 3,
        "swiglu_limit": 0.8,
    },
    "gpt_oss-other": {
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size": 9,
        "sliding_window": 3,
        "layer_types": ["full_attention", "sliding_attention"],
        "attention_bias": False,
        "head_dim": 16,
        "num_key_value_heads": 4,
        "rope_scaling": {**YARN, "truncate": False},
        "swiglu_alpha": 1.2,
        "tie_word_embeddings": True,
    },
    "deepseek_v2": {
        **DEEPSEEK,
        "model_type": "deepseek_v2",
        "qk_nope_head_dim": 8,  # transformers needs even sizes
        "q_lora_rank": 10,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 1.7,
        "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
    },
    "deepseek_v2-greedy": {
        **DEEPSEEK,
        "model_type": "deepseek_v2",
        "qk_nope_head_dim": 8,  # transformers needs even sizes
        "q_lora_rank": None,
        "n_group": 4,
        "topk_method": "greedy",
        "mlp_bias": True,
    },
    "glm4_moe_lite": LITE,
    "glm4_moe_lite-types": {
        **LITE,
        "num_hidden_layers": 3,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
    },
    "gpt2": {"model_type": "gpt2"},
    "gpt2-odd": {
        "model_type": "gpt2",
        "n_inner": 20,
        "activation_function": "relu",
        "tie_word_embeddings": False,
        "scale_attn_weights": False,
        "scale_attn_by_inverse_layer_idx": True,
    },
}
"""Configs that each differ from the default in one respect."""


def hf_model(values: dict[str, Any], seed: int) -> Any:
    """transformers' model of a config with all parameters random, also biases and norms."""
    config = AutoConfig.for_model(**(values if "vocab_size" in values else {**BASE, **values}))
    # (Its grouped products of experts refuse sizes that are not a multiple of 16 bytes.)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        for name, values in model.named_buffers():
            if name.endswith("correction_bias"):
                values.copy_(torch.randn(values.shape, generator=generator) * 0.3)
    return model


def random_decoder(config: ModelConfig, seed: int = 0, scale: float = 10.0) -> Decoder:
    """A decoder with large random weights, so that its distributions are far from uniform."""
    decoder = build(config)
    state = {
        name: init_tensor(name, tuple(value.shape), config, seed)
        * (1 if name.endswith("norm.weight") else scale)
        for name, value in decoder.state_dict().items()
    }
    decoder.load_state_dict(state)
    return decoder


def small_decoder(name: str = "qwen3", **changes: Any) -> Decoder:
    return random_decoder(ModelConfig.from_hf({**BASE, **ODD[name], **changes}))


@pytest.fixture(autouse=True)
def quiet_transformers() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@pytest.fixture
def pair(tmp_path: Path) -> Callable[..., tuple[Decoder, Any]]:
    """(name of an odd config, seed) -> (decoder read from the folder, transformers' model)."""

    def make(name: str, seed: int = 0) -> tuple[Decoder, Any]:
        model = hf_model(ODD[name], seed)
        model.save_pretrained(tmp_path / name)
        return from_hf(tmp_path / name), model

    return make


@pytest.fixture
def as_decoder(tmp_path: Path) -> Callable[[Any, dict[str, torch.Tensor]], Decoder]:
    """(transformers' model, values by its parameters' names) -> a decoder with these values."""

    def make(model: Any, values: dict[str, torch.Tensor]) -> Decoder:
        other = copy.deepcopy(model)
        with torch.no_grad():
            for name, parameter in other.named_parameters():
                parameter.copy_(values[name])
        other.save_pretrained(tmp_path / "values")
        return from_hf(tmp_path / "values")

    return make


@pytest.fixture(params=list(ODD))
def odd_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)
