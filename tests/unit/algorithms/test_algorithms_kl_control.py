"""KL control: the sign, the limits, and the state."""

from __future__ import annotations

import json

import pytest

from slurmrl.algorithms.kl_control import AdaptiveKL, FixedKL, KLController
from slurmrl.algorithms.policy.schema import KL, PolicyGradient
from slurmrl.algorithms.scalars import NoScalars


def test_a_fixed_coefficient_stays() -> None:
    control = FixedKL(0.1)
    control.update(100.0, 1000)
    assert control.coef == 0.1


@pytest.mark.parametrize(
    ("kl", "factor"), [(6.0, 1.0), (6.6, 1.01), (5.4, 0.99), (60.0, 1.02), (-1.0, 0.98)]
)
def test_too_large_a_kl_raises_the_coefficient(kl: float, factor: float) -> None:
    control = AdaptiveKL(0.1, target=6.0, horizon=1000.0)
    control.update(kl, n=100)
    assert control.coef == pytest.approx(0.1 * factor)


@pytest.mark.parametrize(("kl", "factor"), [(0.0, 0.8), (60.0, 1.2)])
def test_a_step_of_many_completions_keeps_the_sign(kl: float, factor: float) -> None:
    """A negative one would reward moving away from the reference; a step moves it by 20 %."""
    control = AdaptiveKL(0.1, target=6.0, horizon=100.0)
    control.update(kl, n=4096)
    assert control.coef == pytest.approx(0.1 * factor)


def test_the_control_settles_where_the_target_is() -> None:
    control = AdaptiveKL(0.01, target=2.0, horizon=2000.0)
    for _ in range(500):
        control.update(0.5 / control.coef, n=256)
    assert 0.5 / control.coef == pytest.approx(2.0, rel=0.01)


def test_the_controller_reads_kl_per_completion_and_restores() -> None:
    ppo = PolicyGradient(
        batch_size=100, kl=KL(kind="adaptive", coef=0.1, target=6.0, horizon=1000.0)
    )
    controller = KLController(ppo)
    assert controller.values() == {"kl_coef": 0.1}
    controller.update({"kl_sequence": 9.0, "kl": 0.0, "completions": 100.0})
    assert controller.values()["kl_coef"] == pytest.approx(0.102)
    groups = KLController(ppo)
    groups.update({"kl_sequence": 9.0, "completions": 400.0})
    assert groups.values()["kl_coef"] == pytest.approx(0.108), "the horizon counts completions"
    other = KLController(ppo)
    other.restore(json.loads(json.dumps(controller.state())))
    assert other.values() == controller.values()


def test_the_default_is_fixed() -> None:
    controller = KLController(PolicyGradient(batch_size=1))
    controller.update({"kl_sequence": 100.0, "completions": 1.0})
    assert controller.values() == {"kl_coef": 0.1}


def test_no_scalars_is_empty() -> None:
    nothing = NoScalars(None)
    nothing.update({"kl": 1.0})
    nothing.restore(nothing.state())
    assert nothing.values() == {}
