from __future__ import annotations

from collections.abc import Callable

import torch

from slurmrl.models.config import ModelConfig
from slurmrl.models.decoder import Decoder
from slurmrl.models.init import init_tensor


def config(small_decoder: Callable[..., Decoder]) -> ModelConfig:
    return small_decoder("qwen3", initializer_range=0.05).config


def test_weights_are_normal_with_the_configured_width(
    small_decoder: Callable[..., Decoder],
) -> None:
    value = init_tensor("lm_head.weight", (300, 200), config(small_decoder), 0)
    assert value.dtype == torch.float32
    assert abs(value.std().item() - 0.05) < 0.001
    assert abs(value.mean().item()) < 0.001


def test_a_value_depends_on_seed_and_name_alone(small_decoder: Callable[..., Decoder]) -> None:
    made = config(small_decoder)
    torch.manual_seed(1)
    first = init_tensor("a.weight", (4, 4), made, 7)
    torch.manual_seed(2)
    torch.rand(3)
    assert torch.equal(first, init_tensor("a.weight", (4, 4), made, 7))
    assert not torch.equal(first, init_tensor("b.weight", (4, 4), made, 7))
    assert not torch.equal(first, init_tensor("a.weight", (4, 4), made, 8))


def test_the_global_generator_is_left_alone(small_decoder: Callable[..., Decoder]) -> None:
    made = config(small_decoder)
    before = torch.get_rng_state()
    init_tensor("a.weight", (4, 4), made, 7)
    assert torch.equal(before, torch.get_rng_state())


def test_norms_are_one_and_biases_zero(small_decoder: Callable[..., Decoder]) -> None:
    made = config(small_decoder)
    for name in ("model.norm.weight", "model.layers.0.self_attn.q_norm.weight"):
        assert torch.equal(init_tensor(name, (5,), made, 0), torch.ones(5))
    for layer in ("input_layernorm", "post_attention_layernorm"):
        name = f"model.layers.0.{layer}.weight"
        assert torch.equal(init_tensor(name, (5,), made, 0), torch.ones(5))
    bias = init_tensor("model.layers.0.self_attn.q_proj.bias", (5,), made, 0)
    assert torch.equal(bias, torch.zeros(5))
