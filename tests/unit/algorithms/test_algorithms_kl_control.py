"""KL control: the sign, the limits, and the state."""

from __future__ import annotations

import json

import pytest

from slurmrl.algorithms.policy.hyperparameters import KL
from slurmrl.algorithms.policy.schema import PolicyGradient
from slurmrl.algorithms.scalars import NoScalars, PolicyScalars, adaptation


@pytest.mark.parametrize(
    ("kl", "factor"), [(6.0, 1.0), (6.6, 1.01), (5.4, 0.99), (60.0, 1.02), (-1.0, 0.98)]
)
def test_kl_above_target_raises_the_coefficient(kl: float, factor: float) -> None:
    assert adaptation(kl, 100, target=6.0, horizon=1000.0) == pytest.approx(factor)


@pytest.mark.parametrize(("kl", "factor"), [(0.0, 0.8), (60.0, 1.2)])
def test_coefficient_stays_positive_after_a_step_of_many_completions(
    kl: float, factor: float
) -> None:
    """A negative coefficient would reward distance from the reference. A step changes the
    coefficient by at most 20 %.
    """
    assert adaptation(kl, 4096, target=6.0, horizon=100.0) == pytest.approx(factor)


def test_controller_converges_to_the_target_kl() -> None:
    coef = 0.01
    for _ in range(500):
        coef *= adaptation(0.5 / coef, 256, target=2.0, horizon=2000.0)
    assert 0.5 / coef == pytest.approx(2.0, rel=0.01)


def test_controller_reads_kl_per_completion_and_restores_its_state() -> None:
    ppo = PolicyGradient(
        batch_size=100, kl=KL(kind="adaptive", coef=0.1, target=6.0, horizon=1000.0)
    )
    controller = PolicyScalars(ppo)
    assert controller.values() == {"kl_coef": 0.1}
    controller.update({"kl_sequence": 9.0, "kl": 0.0, "completions": 100.0})
    assert controller.values()["kl_coef"] == pytest.approx(0.102)
    groups = PolicyScalars(ppo)
    groups.update({"kl_sequence": 9.0, "completions": 400.0})
    assert groups.values()["kl_coef"] == pytest.approx(0.108), "the horizon counts completions"
    other = PolicyScalars(ppo)
    other.restore(json.loads(json.dumps(controller.state())))
    assert other.values() == controller.values()


def test_default_kl_coefficient_is_fixed() -> None:
    controller = PolicyScalars(PolicyGradient(batch_size=1))
    controller.update({"kl_sequence": 100.0, "completions": 1.0})
    assert controller.values() == {"kl_coef": 0.1}


def test_controller_without_scalars_returns_no_values() -> None:
    nothing = NoScalars(None)
    nothing.update({"kl": 1.0})
    nothing.restore(nothing.state())
    assert nothing.values() == {}
