"""Scalars that a trial commits: the KL coefficient and the moments of returns."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from slurmrl.algorithms.policy.baselines import CriticInterface
from slurmrl.algorithms.policy.hyperparameters import KL, Value
from slurmrl.algorithms.policy.schema import PolicyGradient
from slurmrl.algorithms.scalars import EPS, PolicyScalars, ReturnMoments, adaptation
from tests.unit.algorithms.conftest import MakeWorld, means


@pytest.mark.parametrize(
    ("kl", "factor"), [(6.0, 1.0), (6.6, 1.01), (5.4, 0.99), (60.0, 1.02), (-1.0, 0.98)]
)
def test_kl_above_target_raises_the_coefficient(kl: float, factor: float) -> None:
    assert adaptation(kl, 100, target=6.0, horizon=1000.0) == pytest.approx(factor)


@pytest.mark.parametrize(("kl", "factor"), [(0.0, 0.8), (60.0, 1.2)])
def test_coefficient_stays_positive_after_a_step_of_many_completions(
    kl: float, factor: float
) -> None:
    """A negative coefficient would reward distance. A step changes it by at most 20 %."""
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


def settings(kind: str) -> PolicyGradient:
    return PolicyGradient.model_validate({"batch_size": 4, "value_norm": kind})


def test_return_moments_are_committed() -> None:
    """A successor continues from the same moments, whichever step it resumes from."""
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


def test_moving_moments_equal_moments_of_all_returns() -> None:
    batches, found = [[1.0, 2.0, 6.0], [-3.0], [0.5, 0.5], [4.0, 8.0]], ReturnMoments()
    for batch in batches:
        mean, square = sum(batch) / len(batch), sum(x**2 for x in batch) / len(batch)
        found = found.moving(mean, square, len(batch))
    returns = torch.tensor([x for batch in batches for x in batch], dtype=torch.float64)
    assert found.mean == pytest.approx(float(returns.mean()))
    assert found.std == pytest.approx(float((returns.var(correction=0) + EPS).sqrt()))


def test_normalization_is_reversible_and_starts_as_identity() -> None:
    moments = ReturnMoments().moving(3.0, 13.0, 5.0)
    assert moments.normalized(5.0) == pytest.approx(1.0, abs=1e-5)
    assert moments.denormalized(moments.normalized(0.7)) == pytest.approx(0.7)
    assert ReturnMoments().normalized(0.7) == 0.7
    same = ReturnMoments().moving(2.0, 4.0, 5.0)
    assert same.normalized(2.0) == 0.0


def take_rewards(world: Any, step: int, scalars: dict[str, float]) -> Any:
    """Return finished completions with large rewards, and the values of ``scalars``."""
    sample = world.rollout(step)
    sample.data["finished"] = torch.ones_like(sample.tensor("finished"))
    sample.data["rewards"] = 100.0 + 20.0 * sample.tensor("rewards")
    context = world.context(step, sample.ids, kl_coef=0.0, **scalars)
    output = CriticInterface().inference(world.critic, sample, context).sample
    assert output is not None
    sample.update_(output)
    return sample, context


OPTIONS = {"reward_clip": None, "n_minibatches": 1, "value_clip": 0.2, "value_norm": "moving"}


def test_critic_predicts_normalized_returns(make_world: MakeWorld) -> None:
    """The outputs are rescaled for the advantages."""
    world = make_world(**{**OPTIONS, "value_norm": "none"})
    before = ReturnMoments().moving(90.0, 90.0**2 + 25.0, 10.0)
    plain, _ = take_rewards(world, 1, {})
    raw = plain.tensor("values")
    world = make_world(**OPTIONS)
    sample, context = take_rewards(world, 1, before.scalars())
    torch.testing.assert_close(sample.tensor("values"), raw * before.std + 90.0)
    estimates = world.estimate(sample)
    returns, own = estimates.returns.double(), raw[estimates.responses.tokens - 1].double()
    after = before.moving(float(returns.mean()), float(returns.square().mean()), len(returns))
    stats = means(CriticInterface().train_step(world.critic, sample, context))
    assert {name: stats[name] for name in after.scalars()} == pytest.approx(after.scalars())
    expected = 0.5 * ((own - (returns - after.mean) / after.std) ** 2).mean()
    assert stats["value_loss"] == pytest.approx(float(expected), rel=1e-4)
    assert stats["value_clip_fraction"] == 0.0


def test_value_norm_decay_requires_exponential_moments() -> None:
    with pytest.raises(ValueError, match="value_norm_decay is not allowed with value_norm: moving"):
        Value(value_norm="moving", value_norm_decay=0.9)
    assert Value(value_norm="exponential", value_norm_decay=0.9).value_norm_decay == 0.9
