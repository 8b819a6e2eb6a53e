"""Limits of importance weights and their settings, and M2PO's mask against the loop of its paper.
test_algorithms_whole_steps.py compares whole steps with loops over tokens.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from slurmrl.algorithms.policy.hyperparameters import Correction
from slurmrl.algorithms.policy.objective import correction_weights, second_moment_mask
from slurmrl.algorithms.sequences import Sequences

LENGTHS = [4, 3, 1, 2]
MASK = torch.tensor([0, 1, 1, 1, 1, 1, 0, 1, 0, 0]).bool()
SEQUENCES = Sequences.of(torch.tensor([0, *LENGTHS]).cumsum(0), torch.device("cpu"))


@pytest.mark.parametrize("bound", [{"reject_upper": 2.0}, {"reject_lower": 0.5}])
def test_rejection_with_one_bound_leaves_the_other_side_open(bound: dict[str, float]) -> None:
    far = torch.tensor([-200.0] * 5 + [200.0] * 5)
    settings = Correction(correction="none", reject_by="ratio", **bound)
    found = correction_weights(far, torch.zeros(10), MASK, SEQUENCES, settings)
    low, high = (MASK & (far < 0)).sum(), (MASK & (far > 0)).sum()
    assert int(found.sum()) == int(low if "reject_upper" in bound else high)


def test_importance_weight_stays_finite_instead_of_overflowing() -> None:
    far = torch.full((10,), 200.0)
    weights = correction_weights(
        far, torch.zeros(10), MASK, SEQUENCES, Correction(correction="weight")
    )
    assert torch.isfinite(weights).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"correction_level": "sequence"}, "correction_level is not allowed with correction: none"),
        ({"correction": "weight", "correction_upper": 3.0}, "correction_upper is not allowed"),
        (
            {"correction": "mask", "correction_lower": 3.0},
            "correction_lower 3.0 exceeds correction_upper 2.0",
        ),
        (
            {"correction": "truncate", "recompute_logprobs": False},
            "correction: truncate is not allowed with recompute_logprobs: false",
        ),
        (
            {"reject_by": "k3", "reject_upper": 1.0, "recompute_logprobs": False},
            "reject_by: k3 is not allowed with recompute_logprobs: false",
        ),
        ({"reject_by": "k2"}, "reject_by: k2 is not allowed without a bound"),
        ({"reject_over": "max"}, "reject_over is not allowed with no reject_by"),
        (
            {"reject_by": "k1", "reject_upper": 1.0, "reject_lower": 2.0},
            "reject_lower 2.0 exceeds reject_upper 1.0",
        ),
        ({"reject_by": "ratio", "reject_lower": -1.0}, "use 0 or more"),
    ],
)
def test_impossible_corrections_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Correction(**options)


def algorithm_1(log_ratios: Tensor, advantages: Tensor, mask: Tensor, limit: float) -> list[bool]:
    """Drop tokens with the largest squared log-ratio until the mean square is within limit."""
    kept = mask.tolist()
    trusted = {
        t: float(log_ratios[t]) ** 2
        for t in range(len(mask))
        if mask[t] and float(log_ratios[t] * advantages[t]) > 0
    }
    while trusted and sum(trusted.values()) / len(trusted) > limit:
        worst = max(trusted, key=trusted.__getitem__)
        kept[worst] = False
        del trusted[worst]
    return kept


@pytest.mark.parametrize("limit", [1e-6, 0.04, 0.3, 1.0, 100.0])
def test_second_moment_mask_equals_the_loop_of_the_paper(limit: float) -> None:
    """This holds for any order of tokens and any distribution over ranks."""
    generator = torch.Generator().manual_seed(5)
    log_ratios, advantages = torch.randn(2, 200, generator=generator)
    mask = torch.rand(200, generator=generator) > 0.2
    expected = algorithm_1(log_ratios, advantages, mask, limit)
    found = second_moment_mask(log_ratios, advantages, mask, limit, lambda sums: sums)
    assert found.tolist() == expected
    order = torch.randperm(200, generator=generator)
    shuffled = second_moment_mask(
        log_ratios[order], advantages[order], mask[order], limit, lambda sums: sums
    )
    assert torch.equal(shuffled, found[order])


def test_second_moment_mask_drops_equal_tokens_together() -> None:
    """Tokens with equal squares are dropped together. A batch without moved tokens keeps all."""
    ones, yes = torch.ones(4), torch.ones(4, dtype=torch.bool)
    same = second_moment_mask(torch.full((4,), 0.5), ones, yes, 0.04, lambda sums: sums)
    assert not same.any()
    still = second_moment_mask(torch.zeros(4), ones, yes, 0.04, lambda sums: sums)
    assert still.all()
    back = second_moment_mask(torch.full((4,), -3.0), ones, yes, 0.04, lambda sums: sums)
    assert back.all()
    nothing = torch.zeros(0)
    none = second_moment_mask(nothing, nothing, nothing.bool(), 0.04, lambda sums: sums)
    assert none.shape == (0,)
