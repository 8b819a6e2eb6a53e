"""Normalised returns: their running moments, as a part of the committed state, and what the critic
does with them.
"""

from __future__ import annotations

import json

import pytest

from slurmrl.algorithms.policy.schema import PolicyGradient
from slurmrl.algorithms.policy.sections import Value
from slurmrl.algorithms.scalars import PolicyScalars, ReturnMoments


def test_normalisation_can_be_undone_and_is_none_before_the_first_returns() -> None:
    moments = ReturnMoments().moving(3.0, 13.0, 5.0)
    assert moments.normalized(5.0) == pytest.approx(1.0, abs=1e-5)
    assert moments.denormalized(moments.normalized(0.7)) == pytest.approx(0.7)
    assert ReturnMoments().normalized(0.7) == 0.7
    same = ReturnMoments().moving(2.0, 4.0, 5.0)
    assert same.normalized(2.0) == 0.0


def settings(kind: str) -> PolicyGradient:
    return PolicyGradient.model_validate({"batch_size": 4, "value_norm": kind})


def test_the_moments_are_part_of_the_committed_state() -> None:
    """A successor continues from the very same numbers, whichever step it resumes from."""
    reported = [
        {"kl_sequence": 0.0, "completions": 4.0, **ReturnMoments(0.1 * n, 1 / n, 1 / 3).scalars()}
        for n in (1, 2, 3)
    ]
    whole, first = PolicyScalars(settings("moving")), PolicyScalars(settings("moving"))
    for stats in reported:
        whole.update(stats)
    for stats in reported[:2]:
        first.update(stats)
    successor = PolicyScalars(settings("moving"))
    successor.restore(json.loads(json.dumps(first.state())))
    assert successor.values() == first.values()
    successor.update(reported[2])
    assert successor.values() == whole.values()
    assert successor.values()["value_norm_mean"] == 1 / 3
    assert "value_norm_mean" not in PolicyScalars(settings("none")).state()


def test_the_decay_belongs_to_exponential_moments() -> None:
    with pytest.raises(ValueError, match="value_norm_decay is not allowed with value_norm: moving"):
        Value(value_norm="moving", value_norm_decay=0.9)
    assert Value(value_norm="exponential", value_norm_decay=0.9).value_norm_decay == 0.9
