from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from slurmrl.models.config import attention_flops, forward_flops, train_flops
from slurmrl.models.decoder import Decoder
from tests.unit.models.conftest import small_decoder


@pytest.mark.parametrize(
    "name", ["llama", "qwen2-odd-hidden", "qwen3-wide-heads", "gpt2", "qwen3_moe-some-dense"]
)
def test_estimate_equals_what_torch_counts(name: str) -> None:
    decoder: Decoder = small_decoder(name)
    ids, cu = torch.arange(30), torch.tensor([0, 30], dtype=torch.int32)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        decoder(ids, cu, 30) @ decoder.head_weight().T
    counted = counter.get_flop_counts()["Global"]
    kinds = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten._grouped_mm)
    products = sum(n for op, n in counted.items() if op in kinds)
    config = decoder.config
    assert products == forward_flops(config, [30]) - attention_flops(config, 30)


def test_attention_counts_causal_pairs() -> None:
    config = small_decoder("llama").config
    pairs = sum(range(1, 8))
    per_pair = 2 * 2 * config.head_dim * config.num_heads * config.num_layers
    assert attention_flops(config, 7) == pairs * per_pair
    assert train_flops(config, [7, 7]) == 6 * forward_flops(config, [7])


def test_a_window_leaves_out_pairs() -> None:
    config = small_decoder("qwen2-windows").config  # one of the two layers sees 5 tokens
    per_pair = 2 * 2 * config.head_dim * config.num_heads
    assert attention_flops(config, 4) == 2 * per_pair * 10
    assert attention_flops(config, 8) == per_pair * (36 + 1 + 2 + 3 + 4 + 4 * 5)
