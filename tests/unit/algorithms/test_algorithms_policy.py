"""PPO on real engines: the properties of a healthy step, and that deliberate faults show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from slurmrl.algorithms.policy import advantages, baselines
from slurmrl.algorithms.policy.actor import ActorInterface
from slurmrl.algorithms.policy.baselines import critic_loss
from slurmrl.algorithms.policy.sections import KL
from slurmrl.data.sample import SequenceSample
from slurmrl.engines.base import TrainEngine
from slurmrl.tensors.ops.scan import packed_gae
from tests.support.host_waits import host_waits

MakeWorld = Callable[..., Any]
STEP_WAITS, UPDATE_WAITS = 7, 2
"""How often the host may wait for a GPU: in a step for the positions of responses, the numbers of
tokens, moments, the KL and what is kept of samples; in each of its updates for the statistics and
the gradient's norm."""


def check_first_update_is_on_policy(world: Any) -> None:
    """Before any update the new policy is the sampling policy: every ratio is 1."""
    stats = world.train_actor(world.rollout(step=1), 1, kl_coef=0.0)
    assert stats["actor_updates"] == 1.0
    assert stats["importance_ratio"] == pytest.approx(1.0, abs=1e-4)
    assert stats["approx_kl"] == pytest.approx(0.0, abs=1e-6)
    assert stats["clip_fraction"] == 0.0


def check_reference_is_the_start(world: Any) -> None:
    """The KL to the reference is 0 at first, and not after updates."""
    first = world.train_actor(world.rollout(step=1), 1, kl_coef=0.0)
    assert first["kl"] == pytest.approx(0.0, abs=1e-5)
    for step in range(2, 6):
        last = world.train_actor(world.rollout(step), step, kl_coef=0.0)
    assert last["kl_sequence"] > 0.05


def groups(world: Any, prompts: int, n: int) -> SequenceSample:
    """Prompts of one batch with ``n`` completions each, and all that training reads."""
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
def test_a_group_of_completions_may_exceed_a_micro_batch(make_world: MakeWorld, role: str) -> None:
    """Its sequences are packed apart, within the token budget, and the results are in order."""
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


def check_good_completions_have_advantages(world: Any) -> None:
    """With values of 0, a reward is a positive advantage and a penalty a negative one."""
    sample = world.rollout(step=1)
    sample.data["values"] = torch.zeros_like(sample.tensor("values"))
    for reward in (1.0, -1.0):
        sample.data["rewards"] = torch.full((sample.bs,), reward)
        sample.data["finished"] = torch.ones(sample.bs, dtype=torch.bool)
        found = world.estimate(sample).advantages
        torch.testing.assert_close(found, torch.full_like(found, reward))


def check_training_raises_the_reward(world: Any) -> None:
    before = float(world.rollout(step=0).tensor("rewards").mean())
    for step in range(1, 9):
        sample = world.rollout(step)
        world.train_actor(sample, step, kl_coef=0.0)
    after = float(world.rollout(step=99).tensor("rewards").mean())
    assert after > before + 0.1


def test_the_first_update_is_on_policy(make_world: MakeWorld) -> None:
    check_first_update_is_on_policy(make_world(n_minibatches=1))


def test_stale_log_probabilities_are_seen(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(n_minibatches=1)
    stale = world.rollout(step=1)
    for step in range(2, 5):
        world.train_actor(world.rollout(step), step, kl_coef=0.0)
    monkeypatch.setattr(type(world), "rollout", lambda self, step: stale)
    with pytest.raises(AssertionError):
        check_first_update_is_on_policy(world)


def test_the_reference_is_the_start(make_world: MakeWorld) -> None:
    check_reference_is_the_start(make_world())


def test_a_reference_of_other_weights_is_seen(make_world: MakeWorld) -> None:
    with pytest.raises(AssertionError):
        check_reference_is_the_start(make_world(ref_seed=2))


def test_a_reference_that_follows_the_actor_is_seen(make_world: MakeWorld) -> None:
    world = make_world()
    world.ref = world.actor
    with pytest.raises(AssertionError):
        check_reference_is_the_start(world)


def test_good_completions_have_advantages_and_training_raises_the_reward(
    make_world: MakeWorld,
) -> None:
    check_good_completions_have_advantages(make_world())
    check_training_raises_the_reward(make_world())


@pytest.mark.parametrize(
    "check", [check_good_completions_have_advantages, check_training_raises_the_reward]
)
def test_a_flipped_sign_in_gae_is_seen(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, check: Callable[[Any], None]
) -> None:
    def flipped(rewards: torch.Tensor, *rest: Any) -> Any:
        found, returns = packed_gae(rewards, *rest)
        return -found, returns

    monkeypatch.setattr(advantages, "packed_gae", flipped)
    with pytest.raises(AssertionError):
        check(make_world())


def explained(world: Any, sample: SequenceSample) -> float:
    """Share of the returns' variance that the critic explains."""
    returns = world.estimate(sample).returns
    values = world.critic.forward(sample.only(["input_ids"]))["values"]
    states = world.estimate(sample).responses.tokens - 1
    return 1.0 - float((returns - values[states]).var() / returns.var())


def fit_critic(world: Any, steps: int) -> float:
    sample = world.rollout(step=1, prompts=64)
    for step in range(steps):
        world.train_critic(sample, step, kl_coef=0.0)
    return explained(world, sample)


def test_the_critic_alone_fits_the_returns_of_a_fixed_rollout(make_world: MakeWorld) -> None:
    world = make_world(value_clip=None, n_minibatches=4)
    assert fit_critic(world, 0) == pytest.approx(0.0, abs=0.3)
    assert fit_critic(world, 20) >= 0.5


def test_a_dead_critic_is_seen(make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    def dead(*arguments: Any, **options: Any) -> Any:
        loss, stats = critic_loss(*arguments, **options)
        return loss * 0.0, stats

    monkeypatch.setattr(baselines, "critic_loss", dead)
    assert fit_critic(make_world(value_clip=None, n_minibatches=4), 20) < 0.5


def test_explained_variance_is_reported_of_the_values_at_sampling(make_world: MakeWorld) -> None:
    world = make_world(value_clip=None)
    sample = world.rollout(step=1)
    wanted = explained(world, sample)
    stats = world.train_critic(sample, 1, kl_coef=0.0)
    assert stats["explained_variance"] == pytest.approx(wanted, abs=0.02)
    assert stats["critic_updates"] == 2.0


def final_kl(world: Any, kl_coef: float) -> float:
    for step in range(1, 11):
        stats = world.train_actor(world.rollout(step, prompts=32), step, kl_coef)
    return float(stats["kl_sequence"])


@pytest.mark.parametrize("where", [{"where": "reward"}, {"where": "loss", "estimator": "k3"}])
def test_a_larger_kl_coefficient_gives_a_smaller_final_kl(
    make_world: MakeWorld, where: dict[str, Any]
) -> None:
    """The penalty holds the actor near the reference, in the reward and in the loss."""
    free, tied = (final_kl(make_world(kl=KL(**where)), coef) for coef in (0.0, 1.0))
    assert free > 2 * abs(tied)
    assert free > 0.1


def test_the_same_step_twice_gives_the_same_numbers(make_world: MakeWorld) -> None:
    runs = []
    for _ in range(2):
        world = make_world()
        runs.append(world.train_actor(world.rollout(step=1), 1, kl_coef=0.1))
    assert runs[0] == runs[1]


def weights(engine: TrainEngine) -> dict[str, torch.Tensor]:
    held = engine._shards.local()  # type: ignore[attr-defined]
    return {name: tensor.clone() for name, tensor in held.items()}


@pytest.mark.parametrize("runs_away", [0, 2, None])
def test_the_update_whose_ratio_runs_away_is_not_made(
    make_world: MakeWorld, runs_away: int | None
) -> None:
    """A vetoed update also ends the step.

    The third of four minibatches was sampled by a very different policy, so its mean ratio exceeds
    the limit.
    """
    world, other = (make_world(n_minibatches=4, n_epochs=2) for _ in range(2))
    sample = world.rollout(step=1)
    if runs_away is not None:
        first = sum(sample.item_lengths("input_ids")[: 12 * runs_away])
        sample.tensor("logprobs")[first:] -= 3.0
    stats = world.train_actor(sample, 1, kl_coef=0.0)
    made = 8 if runs_away is None else runs_away
    assert stats["actor_updates"] == world.actor.steps == made
    assert stats["early_stop"] == (runs_away is not None)
    assert (stats["importance_ratio"] > 5.0) == (runs_away is not None)
    free = make_world(n_minibatches=4, n_epochs=2, early_stop_importance_ratio=None)
    assert free.train_actor(sample, 1, kl_coef=0.0)["actor_updates"] == 8
    before, after = weights(other.actor), weights(world.actor)
    assert all(torch.equal(before[name], after[name]) for name in before) == (made == 0)


def test_more_minibatches_than_completions_leave_out_the_empty_ones(make_world: MakeWorld) -> None:
    world = make_world(n_minibatches=5)
    stats = world.train_actor(world.rollout(step=1, prompts=3), 1, kl_coef=0.0)
    assert stats["actor_updates"] == 3.0


@pytest.mark.parametrize("train", ["train_actor", "train_critic"])
@pytest.mark.parametrize("budget", [10_000, 40])
def test_a_step_waits_as_often_whatever_the_number_of_micro_batches(
    make_world: MakeWorld, train: str, budget: int
) -> None:
    """Losses, masks and indices of a micro-batch make the host wait for nothing on a GPU."""
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
    """Groups of completions need neither values nor reference log-probabilities, and report none of
    their metrics, but the number of completions.
    """
    world = make_world(advantage="none", kl=KL(coef=0.0), n_minibatches=1)
    sample = world.rollout(step=1)
    sample = sample.only(set(sample.keys) - {"values", "ref_logprobs"})
    stats = world.train_actor(sample, 1, kl_coef=0.0)
    assert stats["actor_updates"] == 1.0
    assert stats["completions"] == sample.bs
    assert not {"kl", "kl_sequence", "kl_loss"} & set(stats)
