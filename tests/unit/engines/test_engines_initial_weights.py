from __future__ import annotations

import torch

from slurmrl.engines.role_weights import init_tensor
from slurmrl.models.architecture import ModelConfig

CONFIG = ModelConfig.from_hf(
    {
        "model_type": "qwen3",
        "vocab_size": 300,
        "hidden_size": 200,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "initializer_range": 0.05,
    }
)


def test_initial_weights_are_normal_with_the_configured_deviation() -> None:
    value = init_tensor("lm_head.weight", (300, 200), CONFIG, 0)
    assert value.dtype == torch.float32
    assert abs(value.std().item() - 0.05) < 0.001
    assert abs(value.mean().item()) < 0.001


def test_initial_weights_depend_only_on_seed_and_name() -> None:
    torch.manual_seed(1)
    first = init_tensor("a.weight", (4, 4), CONFIG, 7)
    torch.manual_seed(2)
    torch.rand(3)
    assert torch.equal(first, init_tensor("a.weight", (4, 4), CONFIG, 7))
    assert not torch.equal(first, init_tensor("b.weight", (4, 4), CONFIG, 7))
    assert not torch.equal(first, init_tensor("a.weight", (4, 4), CONFIG, 8))


def test_global_random_generator_is_unchanged() -> None:
    before = torch.get_rng_state()
    init_tensor("a.weight", (4, 4), CONFIG, 7)
    assert torch.equal(before, torch.get_rng_state())


def test_norms_are_one_and_biases_zero() -> None:
    for name in ("model.norm.weight", "model.layers.0.self_attn.q_norm.weight"):
        assert torch.equal(init_tensor(name, (5,), CONFIG, 0), torch.ones(5))
    for layer in ("input_layernorm", "post_attention_layernorm"):
        name = f"model.layers.0.{layer}.weight"
        assert torch.equal(init_tensor(name, (5,), CONFIG, 0), torch.ones(5))
    bias = init_tensor("model.layers.0.self_attn.q_proj.bias", (5,), CONFIG, 0)
    assert torch.equal(bias, torch.zeros(5))
