"""Schedules at their defining points; AdamW and clipping against torch's."""

from __future__ import annotations

from math import cos, pi
from typing import Any

import pytest
import torch
from torch import nn

from slurmrl.config.schema.roles import Optimizer
from slurmrl.engines.fsdp.sharding import clip, global_norm


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
