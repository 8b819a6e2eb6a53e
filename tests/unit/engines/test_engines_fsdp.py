"""FSDP engines: places of tensors, micro-batches, initial weights and the optimizer."""

from __future__ import annotations

from math import cos, pi
from typing import Any

import pytest
import torch
from torch import nn

from slurmrl.config.schema.roles import Optimizer
from slurmrl.data.sample import SequenceSample
from slurmrl.engines import ENGINES
from slurmrl.engines.fsdp.sharding import clip, global_norm
from slurmrl.engines.microbatch import agree
from slurmrl.engines.planned import LAYOUTS, Placing
from slurmrl.engines.role_weights import init_tensor
from slurmrl.errors import UsageError
from slurmrl.models.architecture import ModelConfig
from slurmrl.models.parallel.boxes import TensorSplit
from slurmrl.models.shapes import parameter_shapes
from slurmrl.tensors.parallel.groups import ParallelContext
from slurmrl.tensors.parallel.topology import ProcessTopology

MOMENTS = ("", "exp_avg/", "exp_avg_sq/")


def placing(layers: int, d: int, t: int, rank: int) -> Placing:
    values = {
        "model_type": "qwen2", "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 192,
        "num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": 2,
    }  # fmt: skip
    config = ModelConfig.from_hf(values)
    topology = ProcessTopology(("dp", "tp"), (d, t))
    tensor = TensorSplit(config, t) if t > 1 else None
    return Placing(parameter_shapes(config, "lm"), "float32", topology, rank, tensor)


@pytest.mark.parametrize(("d", "t"), [(1024, 1), (256, 4), (3, 4)])
def test_layout_size_does_not_grow_with_the_layers(d: int, t: int) -> None:
    counts = [
        sum(len(p.parts) for p in {*placing(layers, d, t, 0).layout(MOMENTS).holders.values()})
        for layers in (1, 40)
    ]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.parametrize(("d", "t"), [(5, 1), (1, 4), (3, 4)])
def test_boxes_of_a_rank_equal_the_layout(d: int, t: int, copies: bool) -> None:
    layout = placing(2, d, t, 0).layout(copies=copies)
    layout.check()
    for rank in range(d * t):
        own = {name: box for name, box in placing(2, d, t, rank).own_boxes().items() if box.count}
        held = {shard.name: shard.box for shard in layout.held_by(rank)}
        assert held.items() <= own.items()
        assert not copies or held == own
    if not copies:
        elements = sum(shard.box.count for _, shard in layout.all_shards())
        assert elements == sum(spec.bytes // 4 for spec in layout.tensors.values())


TOPOLOGY = ProcessTopology(("dp",), (1,))
ALONE = ParallelContext("actor", torch.device("cpu"), 0, (0,), TOPOLOGY, {})
ITEMS = [[8, 1], [3], [3, 3, 3], [20], [1], [2], [4]]


def sample() -> SequenceSample:
    ids = torch.zeros(sum(map(sum, ITEMS)), dtype=torch.int64)
    names = tuple(f"item{index}" for index in range(len(ITEMS)))
    return SequenceSample(names, {"input_ids": ITEMS}, {}, {"input_ids": ids})


def test_micro_batches_respect_the_token_budget() -> None:
    rounds = agree(sample(), 16, 1.0, ALONE)
    assert rounds.parts == ((0, 1, 6), (2, 4, 5), (3,))


def test_padded_micro_batches_respect_the_token_budget() -> None:
    rounds = agree(sample(), 16, 1.0, ALONE, rows="single")
    assert rounds.parts == ((0,), (1, 6), (2, 4, 5), (3,))
    assert rounds.count == 4


def test_batch_without_unmasked_tokens_trains_nothing() -> None:
    agree(sample(), 16, 1.0, ALONE).check("actor")
    with pytest.raises(UsageError, match="actor: no token of this batch counts"):
        agree(sample(), 16, 0.0, ALONE).check("actor")


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


def rates(total: int, **options: Any) -> list[float]:
    return [Optimizer(lr=2.0, **options).learning_rate(step, total) for step in range(total)]


def test_warmup_rises_linearly_to_the_learning_rate() -> None:
    assert rates(6, warmup_steps=4) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


def test_linear_schedule_ends_at_its_final_share() -> None:
    found = rates(5, schedule="linear", min_lr_ratio=0.2)
    assert found == pytest.approx([2.0, 1.6, 1.2, 0.8, 0.4])


def test_cosine_schedule_is_half_a_wave_after_warmup() -> None:
    found = rates(7, schedule="cosine", warmup_steps=2, min_lr_ratio=0.1)
    wave = [0.2 + 1.8 * 0.5 * (1 + cos(pi * k / 4)) for k in range(5)]
    assert found == pytest.approx([1.0, 2.0, *wave])


def test_learning_rate_stays_low_after_the_last_step() -> None:
    options = Optimizer(lr=2.0, schedule="cosine", min_lr_ratio=0.1)
    assert options.learning_rate(50, 10) == pytest.approx(0.2)
    assert Optimizer(lr=2.0, schedule="linear").learning_rate(0, 1) == 2.0
    kept = options.model_copy(update={"schedule_steps": 10})
    assert [kept.learning_rate(n, 50) for n in range(60)] == [
        options.learning_rate(n, 10) for n in range(60)
    ]


def test_gradient_norm_counts_replicated_parameters_once() -> None:
    gradients = {"own": torch.tensor([3.0]), "copied": torch.tensor([4.0])}
    half = {"own": 1, "copied": 2}
    assert global_norm(gradients, (), half.__getitem__) == pytest.approx((9 + 8) ** 0.5)


def test_gradient_clipping_equals_torch() -> None:
    torch.manual_seed(0)
    gradients = {name: torch.randn(4, 3) for name in "abc"}
    parameters = [nn.Parameter(torch.zeros(4, 3)) for _ in gradients]
    for p, gradient in zip(parameters, gradients.values(), strict=True):
        p.grad = gradient.clone()
    norm = global_norm(gradients)
    assert norm == pytest.approx(nn.utils.clip_grad_norm_(parameters, 0.5).item())
    clip(gradients, norm, 0.5)
    for p, gradient in zip(parameters, gradients.values(), strict=True):
        assert p.grad is not None
        assert torch.allclose(p.grad, gradient)
    kept = {name: gradient.clone() for name, gradient in gradients.items()}
    clip(gradients, norm, None)
    clip(gradients, 0.4, 0.5)
    assert all(torch.equal(gradients[name], kept[name]) for name in kept)


def test_planned_layouts_are_tested_for_every_engine() -> None:
    assert set(LAYOUTS) == set(ENGINES)
