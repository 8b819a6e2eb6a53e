"""PPO on real engines: the properties of a healthy step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from slurmrl.algorithms.policy import baselines
from slurmrl.algorithms.policy.actor import ActorInterface
from slurmrl.algorithms.policy.hyperparameters import KL
from slurmrl.data.sample import SequenceSample
from tests.support.host_waits import host_waits

MakeWorld = Callable[..., Any]
STEP_WAITS, UPDATE_WAITS = 7, 2
"""How often the host may wait for a GPU: in a step for the positions of responses, the numbers of
tokens, moments, the KL and what is kept of samples; in each of its updates for the statistics and
the gradient's norm."""


def test_first_update_is_on_policy(make_world: MakeWorld) -> None:
    """Before any update, the policy equals the sampling policy, so every ratio is 1."""
    world = make_world(n_minibatches=1)
    stats = world.train_actor(world.rollout(step=1), 1, kl_coef=0.0)
    assert stats["actor_updates"] == 1.0
    assert stats["importance_ratio"] == pytest.approx(1.0, abs=1e-4)
    assert stats["approx_kl"] == pytest.approx(0.0, abs=1e-6)
    assert stats["clip_fraction"] == 0.0


def test_reference_equals_the_initial_actor(make_world: MakeWorld) -> None:
    """The KL to the reference is 0 at first, and nonzero after updates."""
    world = make_world()
    first = world.train_actor(world.rollout(step=1), 1, kl_coef=0.0)
    assert first["kl"] == pytest.approx(0.0, abs=1e-5)
    for step in range(2, 6):
        last = world.train_actor(world.rollout(step), step, kl_coef=0.0)
    assert last["kl_sequence"] > 0.05


def groups(world: Any, prompts: int, n: int) -> SequenceSample:
    """Return prompts of one batch with ``n`` completions each, and all keys that training reads."""
    sequences = world.rollout(step=1, prompts=prompts * n)
    return SequenceSample(
        tuple(f"{item}@0" for item in range(prompts)),
        {
            key: [
                [length for row in rows[item * n : (item + 1) * n] for length in row]
                for item in range(prompts)
            ]
            for key, rows in sequences.lengths.items()
        },
        data=sequences.data,
    )


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_completion_group_may_exceed_a_micro_batch(make_world: MakeWorld, role: str) -> None:
    """slurmrl packs the sequences separately within the token budget, and keeps their order."""
    world = make_world(n_minibatches=2)
    sample, engine = groups(world, prompts=4, n=6), getattr(world, role)
    interface = ActorInterface() if role == "actor" else baselines.CriticInterface()
    context = world.context(2, sample.ids, kl_coef=0.1)
    whole = interface.inference(engine, sample, context).sample
    assert whole is not None
    [key] = whole.keys
    assert whole.lengths[key] == sample.lengths["input_ids"]
    sizes = []
    run = engine._run

    def watched(ids: torch.Tensor, *rest: Any) -> Any:
        sizes.append(len(ids))
        return run(ids, *rest)

    engine._run, engine._max_tokens = watched, 20
    parts = interface.inference(engine, sample, context).sample
    assert parts is not None
    torch.testing.assert_close(parts.tensor(key), whole.tensor(key), rtol=1e-5, atol=1e-5)
    interface.train_step(engine, sample, context)
    assert max(sizes) <= 20 < max(sample.item_lengths("input_ids"))


def test_correct_completions_have_positive_advantages(make_world: MakeWorld) -> None:
    """With values of 0, a reward gives a positive advantage and a penalty a negative advantage."""
    world = make_world()
    sample = world.rollout(step=1)
    sample.data["values"] = torch.zeros_like(sample.tensor("values"))
    for reward in (1.0, -1.0):
        sample.data["rewards"] = torch.full((sample.bs,), reward)
        sample.data["finished"] = torch.ones(sample.bs, dtype=torch.bool)
        found = world.estimate(sample).advantages
        torch.testing.assert_close(found, torch.full_like(found, reward))


def test_training_raises_the_reward(make_world: MakeWorld) -> None:
    world = make_world()
    before = float(world.rollout(step=0).tensor("rewards").mean())
    for step in range(1, 9):
        sample = world.rollout(step)
        world.train_actor(sample, step, kl_coef=0.0)
    after = float(world.rollout(step=99).tensor("rewards").mean())
    assert after > before + 0.1


def explained(world: Any, sample: SequenceSample) -> float:
    """Return the share of the returns' variance that the critic explains."""
    returns = world.estimate(sample).returns
    values = world.critic.forward(sample.only(["input_ids"]))["values"]
    states = world.estimate(sample).responses.tokens - 1
    return 1.0 - float((returns - values[states]).var() / returns.var())


def fit_critic(world: Any, steps: int) -> float:
    sample = world.rollout(step=1, prompts=64)
    for step in range(steps):
        world.train_critic(sample, step, kl_coef=0.0)
    return explained(world, sample)


def test_critic_fits_returns_of_a_fixed_rollout(make_world: MakeWorld) -> None:
    world = make_world(value_clip=None, n_minibatches=4)
    assert fit_critic(world, 0) == pytest.approx(0.0, abs=0.3)
    assert fit_critic(world, 20) >= 0.5


def test_repeated_step_gives_the_same_numbers(make_world: MakeWorld) -> None:
    runs = []
    for _ in range(2):
        world = make_world()
        runs.append(world.train_actor(world.rollout(step=1), 1, kl_coef=0.1))
    assert runs[0] == runs[1]


def test_empty_minibatches_are_left_out(make_world: MakeWorld) -> None:
    world = make_world(n_minibatches=5)
    stats = world.train_actor(world.rollout(step=1, prompts=3), 1, kl_coef=0.0)
    assert stats["actor_updates"] == 3.0


@pytest.mark.parametrize("train", ["train_actor", "train_critic"])
@pytest.mark.parametrize("budget", [10_000, 40])
def test_host_waits_do_not_grow_with_micro_batches(
    make_world: MakeWorld, train: str, budget: int
) -> None:
    """On a GPU, losses, masks and indices of a micro-batch cause no host waits."""
    world = make_world(n_minibatches=2)
    sample = world.rollout(step=1)
    for engine in (world.actor, world.critic):
        engine._max_tokens = budget
    on_device = [
        tensor for engine in (world.actor, world.critic) for tensor in engine._state().values()
    ]
    on_device += [tensor for tensor in sample.data.values() if tensor is not None]
    with host_waits(on_device) as waits:
        getattr(world, train)(sample, 1, kl_coef=0.1)
    assert 0 < len(waits) <= STEP_WAITS + 2 * UPDATE_WAITS, waits


def test_a_step_without_critic_and_reference_trains(make_world: MakeWorld) -> None:
    """Group advantages need neither values nor reference log-probabilities, and record none of
    their metrics.
    """
    world = make_world(advantage="none", kl=KL(coef=0.0), n_minibatches=1)
    sample = world.rollout(step=1)
    sample = sample.only(set(sample.keys) - {"values", "ref_logprobs"})
    stats = world.train_actor(sample, 1, kl_coef=0.0)
    assert stats["actor_updates"] == 1.0
    assert stats["completions"] == sample.bs
    assert not {"kl", "kl_sequence", "kl_loss"} & set(stats)
