from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from slurmrl.models.architecture import ModelConfig
from slurmrl.models.decoder import Decoder
from slurmrl.plan.estimates.call_costs import attention_flops
from slurmrl.plan.estimates.pass_seconds import forward_flops_per_token
from slurmrl.plan.estimates.shape import ModelShape, read
from tests.unit.models.conftest import small_decoder


def shape_of(config: ModelConfig) -> ModelShape:
    shape = read(config.to_hf())
    assert shape is not None
    return shape


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "qwen2-odd-hidden", "qwen3-wide-heads", "gpt2", "qwen3_moe-some-dense"),
        *("glm4_moe-groups", "gpt_oss-other"),
        *("deepseek_v3", "deepseek_v3-plain-queries", "deepseek_v2", "glm4_moe_lite-types"),
    ],
)
def test_estimated_flops_equal_the_count_of_torch(name: str) -> None:
    decoder: Decoder = small_decoder(name)
    ids, cu = torch.arange(30), torch.tensor([0, 30], dtype=torch.int32)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        decoder(ids, cu, 30) @ decoder.head_weight().T
    counted = counter.get_flop_counts()["Global"]
    kinds = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten._grouped_mm)
    products = sum(n for op, n in counted.items() if op in kinds)
    assert products == 30 * forward_flops_per_token(shape_of(decoder.config), "lm")


def test_attention_counts_causal_pairs() -> None:
    config = small_decoder("llama").config
    per_pair = 2 * 2 * config.head_dim * config.num_heads * config.num_layers
    assert attention_flops(shape_of(config), 7) == sum(range(1, 8)) * per_pair


def test_latent_attention_counts_the_sizes_of_keys_and_values() -> None:
    config = small_decoder("deepseek_v3-plain-queries").config
    assert config.latent is not None
    sizes = config.latent.key + config.latent.value
    assert sizes < 2 * config.head_dim, "the shorter ones are filled up"
    per_pair = 2 * sizes * config.num_heads * config.num_layers
    assert attention_flops(shape_of(config), 7) == sum(range(1, 8)) * per_pair
