"""PPO on real engines: the properties of a healthy step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from slurmrl.algorithms.policy import baselines
from slurmrl.algorithms.policy.actor import ActorInterface
from slurmrl.data.sample import SequenceSample
from tests.support.host_waits import host_waits

MakeWorld = Callable[..., Any]
STEP_WAITS, UPDATE_WAITS = 7, 2
"""How often the host may wait for a GPU: in a step for the positions of responses, the numbers of
tokens, moments, the KL and what is kept of samples; in each of its updates for the statistics and
the gradient's norm."""


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


def test_empty_minibatches_are_left_out(make_world: MakeWorld) -> None:
    world = make_world(n_minibatches=5)
    stats = world.train_actor(world.rollout(step=1, prompts=3), 1, kl_coef=0.0)
    assert stats["actor_updates"] == 3.0


@pytest.mark.parametrize("train", ["train_actor", "train_critic"])
@pytest.mark.parametrize("budget", [10_000, 40])
def test_host_waits_do_not_grow_with_micro_batches(
    make_world: MakeWorld, train: str, budget: int
) -> None:
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
