"""Pairs of the built-in decoder and transformers' own model with the same random weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from slurmrl.models.config import ModelConfig
from slurmrl.models.decoder import Decoder
from slurmrl.models.hf import TensorSource, read_config
from slurmrl.models.init import init_tensor

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
}
"""Configs that differ from the plain case in one respect each."""


def hf_model(values: dict[str, Any], seed: int) -> Any:
    """transformers' model of a config, every parameter random (biases and norms too)."""
    config = AutoConfig.for_model(**{**BASE, **values})
    model = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def load_decoder(folder: Path) -> Decoder:
    config = read_config(folder)
    with torch.device("meta"):
        decoder = Decoder(config)
    with TensorSource(folder) as source:
        state = {name: source.read(name) for name in decoder.state_dict()}
    decoder.load_state_dict(state, assign=True)
    return decoder


def random_decoder(config: ModelConfig, seed: int = 0, scale: float = 10.0) -> Decoder:
    """A decoder with large random weights, so that its distributions are far from uniform."""
    decoder = Decoder(config)
    state = {
        name: init_tensor(name, tuple(value.shape), config, seed)
        * (1 if name.endswith("norm.weight") else scale)
        for name, value in decoder.state_dict().items()
    }
    decoder.load_state_dict(state)
    return decoder


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
        return load_decoder(tmp_path / name), model

    return make


@pytest.fixture
def decoder_of() -> Callable[[ModelConfig], Decoder]:
    return random_decoder


@pytest.fixture
def small_decoder() -> Callable[..., Decoder]:
    def make(name: str = "qwen3", **changes: Any) -> Decoder:
        return random_decoder(ModelConfig.from_hf({**BASE, **ODD[name], **changes}))

    return make


@pytest.fixture(params=list(ODD))
def odd_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)
