"""Importance weights, the mismatch of generation and training, and M2PO's mask, against loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from slurmrl.algorithms.policy.hyperparameters import Correction
from slurmrl.algorithms.policy.objective import (
    correction_weights,
    mismatch_metrics,
    mismatch_sums,
    second_moment_mask,
)
from slurmrl.algorithms.sequences import Sequences

LENGTHS = [4, 3, 1, 2]
MASK = torch.tensor([0, 1, 1, 1, 1, 1, 0, 1, 0, 0]).bool()
SEQUENCE = [number for number, length in enumerate(LENGTHS) for _ in range(length)]
SEQUENCES = Sequences.of(torch.tensor([0, *LENGTHS]).cumsum(0), torch.device("cpu"))
TRAINING, BEHAVIOUR = torch.randn(
    2, len(MASK), generator=torch.Generator().manual_seed(3), dtype=torch.float64
)
COUNTED = MASK.nonzero().flatten().tolist()


def weight(t: int, level: str) -> float:
    own = [u for u in COUNTED if SEQUENCE[u] == SEQUENCE[t]]
    logs = [float(TRAINING[u] - BEHAVIOUR[u]) for u in (own if level != "token" else [t])]
    return math.exp(sum(logs) / (len(logs) if level == "geometric" else 1))


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("kind", ["weight", "truncate", "mask"])
def test_a_correction_weighs_each_token_as_defined(kind: str, level: str) -> None:
    """A weight is that of its token, or the product or the geometric mean over its response; bounds
    move or drop it. Tokens that do not count have none.
    """
    bounds = {} if kind == "weight" else {"correction_lower": 0.6, "correction_upper": 1.4}
    settings = Correction(correction=kind, correction_level=level, **bounds)
    found = correction_weights(TRAINING, BEHAVIOUR, MASK, SEQUENCES, settings)
    expected = [0.0] * len(MASK)
    for t in COUNTED:
        exact = weight(t, level)
        expected[t] = {
            "weight": exact,
            "truncate": min(max(exact, 0.6), 1.4),
            "mask": exact if 0.6 <= exact <= 1.4 else 0.0,
        }[kind]
    assert found.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_the_bounds_of_each_level_act(level: str) -> None:
    kinds = {
        tuple(
            correction_weights(
                TRAINING,
                BEHAVIOUR,
                MASK,
                SEQUENCES,
                Correction(correction=kind, correction_level=level, **bounds),
            ).tolist()
        )
        for kind, bounds in [
            ("weight", {}),
            ("truncate", {"correction_upper": 1.1}),
            ("truncate", {"correction_upper": 1.1, "correction_lower": 0.9}),
            ("mask", {"correction_upper": 1.1}),
            ("mask", {"correction_upper": 1.1, "correction_lower": 0.9}),
        ]
    }
    assert len(kinds) == 5


@pytest.mark.parametrize("over", ["token", "mean", "sum", "max"])
@pytest.mark.parametrize("by", ["ratio", "k1", "k2", "k3"])
@pytest.mark.parametrize("correction", ["none", "truncate"])
def test_rejected_tokens_have_no_weight(by: str, over: str, correction: str) -> None:
    """Each by its own value, or all of a response by the mean, sum or largest of its values."""
    logs = [float(TRAINING[t] - BEHAVIOUR[t]) for t in range(len(MASK))]
    value: dict[str, Callable[[float], float]] = {
        "ratio": lambda x: x,
        "k1": lambda x: -x,
        "k2": lambda x: x * x / 2,
        "k3": lambda x: math.exp(x) - 1 - x,
    }
    join = {"mean": lambda x: sum(x) / len(x), "sum": sum, "max": max}
    bounds = {"reject_lower": 0.3, "reject_upper": 1.1}
    common: dict[str, Any] = {"correction": correction}
    plain = correction_weights(TRAINING, BEHAVIOUR, MASK, SEQUENCES, Correction(**common))
    settings = Correction(**common, reject_by=by, reject_over=over, **bounds)
    found = correction_weights(TRAINING, BEHAVIOUR, MASK, SEQUENCES, settings)
    kept = 0
    for t in range(len(MASK)):
        own = [value[by](logs[u]) for u in COUNTED if SEQUENCE[u] == SEQUENCE[t]]
        compared = value[by](logs[t]) if over == "token" else join[over](own) if own else 0.0
        compared = math.exp(compared) if by == "ratio" else compared
        accepted = t in COUNTED and 0.3 <= compared <= 1.1
        kept += accepted
        assert float(found[t]) == (float(plain[t]) if accepted else 0.0)
    assert kept < len(COUNTED), "some are rejected"


@pytest.mark.parametrize("bound", [{"reject_upper": 2.0}, {"reject_lower": 0.5}])
def test_rejection_with_one_bound_leaves_other_side_open(bound: dict[str, float]) -> None:
    far = torch.tensor([-200.0] * 5 + [200.0] * 5)
    settings = Correction(correction="none", reject_by="ratio", **bound)
    found = correction_weights(far, torch.zeros(10), MASK, SEQUENCES, settings)
    low, high = (MASK & (far < 0)).sum(), (MASK & (far > 0)).sum()
    assert int(found.sum()) == int(low if "reject_upper" in bound else high)


def test_a_weight_that_would_overflow_stays_finite() -> None:
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
def test_corrections_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Correction(**options)


def metrics(training: Tensor, behaviour: Tensor, mask: Tensor) -> dict[str, float]:
    sums = mismatch_sums(training, behaviour, mask)
    return mismatch_metrics({name: float(value) for name, value in sums.items()}, float(mask.sum()))


def test_mismatch_metrics_are_those_of_a_loop() -> None:
    ratios = [math.exp(float(TRAINING[t] - BEHAVIOUR[t])) for t in COUNTED]
    count = len(ratios)
    assert metrics(TRAINING, BEHAVIOUR, MASK) == pytest.approx(
        {
            "mismatch/kl": sum(r - 1 - math.log(r) for r in ratios) / count,
            "mismatch/kl_k1": -sum(math.log(r) for r in ratios) / count,
            "mismatch/ratio_max": max(ratios),
            "mismatch/effective_sample_size": sum(ratios) ** 2
            / (count * sum(r**2 for r in ratios)),
        }
    )


def test_engines_that_agree_have_no_mismatch() -> None:
    assert metrics(BEHAVIOUR, BEHAVIOUR, MASK) == {
        "mismatch/kl": 0.0,
        "mismatch/kl_k1": 0.0,
        "mismatch/ratio_max": 1.0,
        "mismatch/effective_sample_size": 1.0,
    }


def algorithm_1(log_ratios: Tensor, advantages: Tensor, mask: Tensor, limit: float) -> list[bool]:
    """The paper's loop: drop the largest square of the trust-region tokens while their mean square
    exceeds the limit.
    """
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
def test_the_second_moment_mask_is_the_papers_loop(limit: float) -> None:
    """Whatever the order of tokens and their distribution over ranks."""
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


def test_the_second_moment_mask_of_equal_and_of_no_tokens() -> None:
    """Tokens with one square go together, and a batch in which none moved keeps all."""
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
