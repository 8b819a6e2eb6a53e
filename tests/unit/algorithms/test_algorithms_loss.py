"""The losses against loops over single tokens, and their gradients."""

from __future__ import annotations

import math

import pytest
import torch

from slurmrl.algorithms.policy.loss import policy_loss, value_loss
from slurmrl.algorithms.sft.interface import cross_entropy

MASK = torch.tensor([False, True, True, True, True, False])


def noise(seed: int) -> torch.Tensor:
    return torch.randn(6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_policy_loss_token_by_token() -> None:
    logp, old, advantages, entropy = (noise(seed) for seed in range(4))
    loss, stats = policy_loss(
        logp, entropy, old, advantages, MASK, clip_ratio=0.2, entropy_coef=0.5
    )
    surrogate = ratios = clipped = k3 = 0.0
    for t in MASK.nonzero().flatten().tolist():
        ratio = math.exp(float(logp[t] - old[t]))
        gain = float(advantages[t])
        bounded = min(max(ratio, 0.8), 1.2)
        surrogate -= min(ratio * gain, bounded * gain)
        clipped += bounded * gain < ratio * gain
        ratios += ratio
        k3 += ratio - 1 - math.log(ratio)
    entropies = float(entropy[MASK].sum())
    assert float(loss) == pytest.approx(surrogate - 0.5 * entropies)
    assert {name: float(value) for name, value in stats.items()} == pytest.approx(
        {
            "actor_loss": surrogate,
            "clip_fraction": clipped,
            "importance_ratio": ratios,
            "approx_kl": k3,
            "approx_kl_k1": float((old - logp)[MASK].sum()),
            "entropy": entropies,
        }
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "moves"),
    [(1.5, 1.0, False), (1.5, -1.0, True), (0.5, 1.0, True), (0.5, -1.0, False), (1.1, 1.0, True)],
)
def test_the_clip_takes_away_only_gradients_that_go_further(
    ratio: float, advantage: float, moves: bool
) -> None:
    logp = torch.tensor([math.log(ratio)], requires_grad=True)
    zero, one = torch.zeros(1), torch.ones(1, dtype=torch.bool)
    loss, stats = policy_loss(logp, zero, zero, torch.tensor([advantage]), one, clip_ratio=0.2)
    loss.backward()
    assert logp.grad is not None
    assert float(logp.grad) == pytest.approx(-advantage * ratio if moves else 0.0)
    assert float(stats["clip_fraction"]) == (not moves)


def test_a_good_token_becomes_likelier_and_a_bad_one_less_likely() -> None:
    logp = torch.tensor([-1.0, -1.0], requires_grad=True)
    mask = torch.ones(2, dtype=torch.bool)
    loss, _ = policy_loss(
        logp, torch.zeros(2), logp.detach(), torch.tensor([1.0, -1.0]), mask, clip_ratio=0.2
    )
    loss.backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == [-1.0, 1.0]


def test_rounding_is_not_counted_as_clipping() -> None:
    old, new, returns = torch.rand(3, 500, generator=torch.Generator().manual_seed(1)) - 0.5
    old, new = 0.19 * old, 0.19 * new
    assert (old + (new - old) != new).any()
    everything = torch.ones(500, dtype=torch.bool)
    _, stats = value_loss(new, old, returns, everything, value_clip=0.2)
    assert stats["value_clip_fraction"] == 0


@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_loss_token_by_token(clip: float | None) -> None:
    values, old, returns = (noise(seed) for seed in range(3))
    loss, stats = value_loss(values, old, returns, MASK, value_clip=clip)
    total, held = 0.0, 0
    for t in MASK.nonzero().flatten().tolist():
        v, o, r = float(values[t]), float(old[t]), float(returns[t])
        bounded = v if clip is None else o + min(max(v - o, -clip), clip)
        total += 0.5 * max((v - r) ** 2, (bounded - r) ** 2)
        held += (bounded - r) ** 2 > (v - r) ** 2
    assert float(loss) == pytest.approx(total)
    assert float(stats["value_loss"]) == pytest.approx(total)
    assert float(stats["value_clip_fraction"]) == held


def test_cross_entropy_counts_answers_only() -> None:
    logp = torch.tensor([0.0, -1.0, -2.0])
    loss = cross_entropy(logp, torch.tensor([False, True, True]))
    assert float(loss) == 3.0


def test_nothing_to_learn_from_is_a_loss_of_zero() -> None:
    none = torch.zeros(6, dtype=torch.bool)
    x = noise(1).requires_grad_()
    loss, _ = policy_loss(x, x, noise(2), noise(3), none, clip_ratio=0.2)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert x.grad is not None
    assert not x.grad.any()
