"""Normalized returns: their running moments, which are committed, and their use by the critic."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from slurmrl.algorithms.policy.baselines import CriticInterface
from slurmrl.algorithms.policy.hyperparameters import Value
from slurmrl.algorithms.policy.schema import PolicyGradient
from slurmrl.algorithms.scalars import EPS, PolicyScalars, ReturnMoments

MakeWorld = Callable[..., Any]
BATCHES = [[1.0, 2.0, 6.0], [-3.0], [0.5, 0.5], [4.0, 8.0]]


def moments_of(batch: list[float]) -> tuple[float, float]:
    return sum(batch) / len(batch), sum(x**2 for x in batch) / len(batch)


def test_exponential_moments_are_weighted_means_over_batches() -> None:
    """A batch followed by k others has the weight 0.9^k before normalization. The weights always
    add up to 1.
    """
    found = ReturnMoments()
    for count, batch in enumerate(BATCHES, start=1):
        found = found.exponential(*moments_of(batch), decay=0.9)
        weights = [0.9 ** (count - 1 - place) for place in range(count)]
        means, squares = zip(*map(moments_of, BATCHES[:count]), strict=True)
        mean, square = (
            sum(w * x for w, x in zip(weights, values, strict=True)) / sum(weights)
            for values in (means, squares)
        )
        assert found.mean == pytest.approx(mean)
        assert found.std == pytest.approx((square - mean**2 + EPS) ** 0.5)


def test_moving_moments_equal_moments_of_all_returns() -> None:
    found = ReturnMoments()
    for batch in BATCHES:
        found = found.moving(*moments_of(batch), len(batch))
    returns = torch.tensor([x for batch in BATCHES for x in batch], dtype=torch.float64)
    assert found.mean == pytest.approx(float(returns.mean()))
    assert found.std == pytest.approx(float((returns.var(correction=0) + EPS).sqrt()))


def test_normalization_is_reversible_and_starts_as_identity() -> None:
    moments = ReturnMoments().moving(3.0, 13.0, 5.0)
    assert moments.normalized(5.0) == pytest.approx(1.0, abs=1e-5)
    assert moments.denormalized(moments.normalized(0.7)) == pytest.approx(0.7)
    assert ReturnMoments().normalized(0.7) == 0.7
    same = ReturnMoments().moving(2.0, 4.0, 5.0)
    assert same.normalized(2.0) == 0.0


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
    """The outputs are rescaled for the advantages.

    The loss uses normalized returns, in the same units as old outputs.
    """
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
    result = CriticInterface().train_step(world.critic, sample, context)
    stats = {name: total / count for name, (total, count) in result.stats.items()}
    assert {name: stats[name] for name in after.scalars()} == pytest.approx(after.scalars())
    expected = 0.5 * ((own - (returns - after.mean) / after.std) ** 2).mean()
    assert stats["value_loss"] == pytest.approx(float(expected), rel=1e-4)
    assert stats["value_clip_fraction"] == 0.0


def test_value_norm_decay_requires_exponential_moments() -> None:
    with pytest.raises(ValueError, match="value_norm_decay is not allowed with value_norm: moving"):
        Value(value_norm="moving", value_norm_decay=0.9)
    assert Value(value_norm="exponential", value_norm_decay=0.9).value_norm_decay == 0.9
