"""Gradients of single tokens, KL estimators, and limits of the losses.
test_algorithms_whole_steps.py compares whole steps with loops over tokens.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from slurmrl.algorithms.policy.hyperparameters import Objective
from slurmrl.algorithms.policy.objective import MASK, kl_estimate, policy_loss, value_loss
from slurmrl.algorithms.supervised import cross_entropy
from slurmrl.data.sample import SequenceSample

LENGTHS = [5, 2, 4, 1, 3]
OBJECTIVES: dict[str, dict[str, Any]] = {
    "clip": {},
    "clip-higher": {"clip_ratio": 0.1, "clip_ratio_high": 2.0},
    "dual-clip": {"dual_clip": 1.05},
    "unclipped": {"objective": "unclipped"},
    "cispo": {"objective": "cispo", "clip_ratio": 1.0, "clip_ratio_high": 0.3},
    "sapo": {"objective": "sapo", "sapo_tau_positive": 0.7, "sapo_tau_negative": 2.0},
}


def noise(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(LENGTHS), generator=generator, dtype=torch.float64)


def batch(lengths: list[int], mask: Tensor, old: Tensor, advantages: Tensor) -> SequenceSample:
    return SequenceSample.from_default(
        lengths,
        [str(place) for place in range(len(lengths))],
        {
            "input_ids": torch.zeros(len(mask), dtype=torch.int64),
            "logprobs": old,
            "advantages": advantages,
            MASK: mask,
        },
    )


@pytest.mark.parametrize(
    ("options", "advantage", "ratio", "slope"),
    [
        ({}, 1.0, 1.5, 0.0),
        ({}, -1.0, 1.5, 1.5),
        ({}, 1.0, 0.5, -0.5),
        ({}, -1.0, 0.5, 0.0),
        ({"clip_ratio_high": 0.6}, 1.0, 1.5, -1.5),
        ({"dual_clip": 3.0}, -1.0, 2.9, 2.9),
        ({"dual_clip": 3.0}, -1.0, 3.1, 0.0),
        ({"dual_clip": 3.0}, 1.0, 0.5, -0.5),
        ({"objective": "unclipped"}, 2.0, 5.0, -10.0),
        ({"objective": "cispo"}, 1.0, 5.0, -1.2),
        ({"objective": "cispo"}, -1.0, 0.1, 0.8),
        ({"objective": "sapo"}, 3.0, 1.0, -3.0),
        ({"objective": "sapo"}, -3.0, 1.0, 3.0),
        ({"objective": "sapo"}, 1.0, math.exp(70), 0.0),
    ],
)
def test_gradient_of_one_token_equals_its_formula(
    options: dict[str, Any], advantage: float, ratio: float, slope: float
) -> None:
    """The gradients are computed by hand, with and without an effect of a bound."""
    logp = torch.tensor([math.log(ratio)], requires_grad=True)
    one = batch([1], torch.ones(1).bool(), torch.zeros(1), torch.tensor([advantage]))
    loss, _ = policy_loss({"logp": logp, "entropy": torch.zeros(1)}, one, Objective(**options))
    loss.backward()
    assert logp.grad is not None
    assert float(logp.grad) == pytest.approx(slope)


def test_loss_is_zero_without_tokens_to_learn_from() -> None:
    x = noise(0).requires_grad_()
    nothing = batch(LENGTHS, torch.zeros(len(x)).bool(), noise(1), noise(11))
    for options in OBJECTIVES.values():
        settings = Objective(**options, ratio="sequence")
        loss, _ = policy_loss({"logp": x, "entropy": x}, nothing, settings)
        loss.backward()
        assert float(loss.detach()) == 0.0
    assert x.grad is not None
    assert not x.grad.any()


def test_kl_estimators_and_gradients_are_right_in_the_mean() -> None:
    """Only k2 and k3 have a nonzero mean gradient."""
    generator = torch.Generator().manual_seed(1)
    logits, other = torch.randn(2, 7, generator=generator, dtype=torch.float64)
    ref = other.log_softmax(0)

    def gradient(of: Any) -> Tensor:
        x = logits.clone().requires_grad_()
        found: Tensor = torch.autograd.grad(of(x.log_softmax(0)), x)[0]
        return found

    policy = logits.log_softmax(0).exp()
    reverse = gradient(lambda logp: (logp.exp() * (logp - ref)).sum())
    forward = gradient(lambda logp: (ref.exp() * (ref - logp)).sum())
    expected = {"k1": torch.zeros_like(reverse), "k2": reverse, "k3": forward}
    for estimator, slope in expected.items():
        found = gradient(lambda logp, k=estimator: (policy * kl_estimate(logp, ref, k)).sum())
        torch.testing.assert_close(found, slope)
    exact = float((policy * (policy.log() - ref)).sum())
    for estimator in ("k1", "k3"):
        mean = float((policy * kl_estimate(policy.log(), ref, estimator)).sum())
        assert mean == pytest.approx(exact)
    assert float(kl_estimate(policy.log(), ref, "k3").min()) >= 0.0
    half = kl_estimate(torch.tensor([2.0]), torch.tensor([1.0]), "k2")
    assert float(half) == 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "sapo", "dual_clip": 3.0}, "dual_clip is not allowed with objective: sapo"),
        ({"objective": "unclipped", "clip_ratio_high": 0.3}, "clip_ratio_high is not allowed"),
        ({"objective": "sapo", "clip_ratio": 0.3}, "clip_ratio is not allowed with"),
        ({"sapo_tau_negative": 2.0}, "sapo_tau_negative is not allowed with objective: clip"),
        ({"aggregation_length": 9}, "aggregation_length is not allowed with aggregation: tokens"),
        ({"dual_clip": 1.0}, "greater than 1"),
    ],
)
def test_settings_unused_by_the_objective_are_rejected(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Objective(**options)


def test_rounding_is_not_counted_as_clipping() -> None:
    old, new, returns = torch.rand(3, 500, generator=torch.Generator().manual_seed(1)) - 0.5
    old, new = 0.19 * old, 0.19 * new
    assert (old + (new - old) != new).any()
    everything = torch.ones(500, dtype=torch.bool)
    _, stats = value_loss(new, old, returns, everything, value_clip=0.2)
    assert stats["value_clip_fraction"] == 0


def test_cross_entropy_counts_only_answer_tokens() -> None:
    logp = torch.tensor([0.0, -1.0, -2.0])
    loss = cross_entropy(logp, torch.tensor([False, True, True]))
    assert float(loss) == 3.0
