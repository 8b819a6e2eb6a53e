"""Advantages without a critic, against loops over single completions in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from slurmrl.algorithms.base import CallContext
from slurmrl.algorithms.policy.advantages import Estimates, estimate, overlong_penalty
from slurmrl.algorithms.policy.hyperparameters import OF_COMPLETIONS
from slurmrl.algorithms.policy.schema import PolicyGradient
from slurmrl.config.schema import Rollout
from slurmrl.data.sample import SequenceSample
from tests.support.tabular_engine import RankThreads

KL_COEF, LIMIT = 0.3, 8
SHAPES = [[(2, 3), (2, 1), (2, 5)], [(1, 8), (1, 2), (1, 4)], [(3, 1), (3, 1), (3, 2)]]
"""(prompt tokens, response tokens) of each completion of three prompts."""


def rollout(shapes: list[list[tuple[int, int]]] = SHAPES, seed: int = 0) -> SequenceSample:
    generator = torch.Generator().manual_seed(seed)
    sequences = [shape for group in shapes for shape in group]
    mask = [[True] * prompt + [False] * response for prompt, response in sequences]
    tokens = sum(map(sum, sequences))

    def noise(n: int) -> Tensor:
        return torch.randn(n, generator=generator, dtype=torch.float64)

    names = [str(item) for item in range(len(shapes))]
    sample = SequenceSample.grouped(
        [[sum(shape) for shape in group] for group in shapes],
        names,
        {
            "prompt_mask": torch.tensor([bit for row in mask for bit in row]),
            "logprobs": noise(tokens),
            "ref_logprobs": noise(tokens),
            "input_ids": torch.arange(tokens),
        },
        per_sequence={
            "rewards": noise(len(sequences)),
            "finished": torch.rand(len(sequences), generator=generator) < 0.7,
        },
    )
    greedy = SequenceSample.from_default(
        [4] * len(shapes),
        names,
        {"greedy_prompt_mask": torch.tensor([True, True, False, False] * len(shapes))},
        per_sequence={
            "greedy_rewards": noise(len(shapes)),
            "greedy_finished": torch.ones(len(shapes), dtype=torch.bool),
        },
    )
    sample.update_(greedy)
    return sample


def algorithm(**options: Any) -> PolicyGradient:
    return PolicyGradient(batch_size=3, **{"reward_clip": None, **options})


def estimates(
    sample: SequenceSample,
    settings: PolicyGradient,
    all_reduce_sum: Callable[[Tensor], Tensor] = lambda x: x,
) -> Estimates:
    config = SimpleNamespace(rollout=Rollout(max_new_tokens=LIMIT))
    scalars = {"kl_coef": KL_COEF}
    context: Any = SimpleNamespace(algorithm=settings, config=config)
    return estimate(
        sample, CallContext(1, 1, scalars, context, context, (), sample.ids), all_reduce_sum
    )


EQUAL = (0.1, 1 / 3, -0.7, 5.0, 1e-3)


@pytest.mark.parametrize("std", ["none", "group", "batch"])
@pytest.mark.parametrize("advantage", OF_COMPLETIONS)
@pytest.mark.parametrize(("epsilon", "dtype"), [(0.0, torch.float32), (1e-6, torch.float64)])
def test_advantages_are_exactly_zero_in_groups_of_equal_scores(
    advantage: str, std: str, epsilon: float, dtype: torch.dtype
) -> None:
    """This holds on any number of ranks. Rounding errors would become full steps of Adam."""
    spread = {} if std == "none" else {"std_epsilon": epsilon}
    settings = algorithm(advantage=advantage, advantage_std=std, kl={"coef": 0.0}, **spread)
    for value in EQUAL:
        sample = rollout([[(2, 3)] * count for count in (3, 5, 7, 6)])
        counts = sample.sequence_counts("rewards")
        values = [value if "batch" in advantage else value + item for item in range(4)]
        rewards = [v for v, n in zip(values, counts, strict=True) for _ in range(n)]
        sample.data["rewards"] = torch.tensor(rewards, dtype=dtype)
        for size in (1, 2, 3):
            for found in advantages_on_ranks(sample, settings, size):
                assert len(found) > 0
                assert not found.any(), (value, size)


def advantages_on_ranks(
    sample: SequenceSample, settings: PolicyGradient, size: int
) -> list[Tensor]:
    ranks = RankThreads(size)

    def on_rank(rank: int) -> Tensor:
        own = sample.take(range(rank, len(sample.ids), size))
        return estimates(own, settings, partial(ranks.sum, rank)).advantages

    return ranks.run(on_rank)


@pytest.mark.parametrize("advantage", ["group", "leave_one_out", "batch"])
def test_only_completion_that_did_not_fail_has_advantage_zero(advantage: str) -> None:
    """Covers groups in which all or all but one completion failed."""
    sample = rollout([[(2, 0), (2, 0)], [(2, 0), (2, 0)], [(2, 1), (2, 0)]])
    settings = algorithm(advantage=advantage, kl={"coef": 0.0})
    assert estimates(sample, settings).advantages.tolist() == [0.0]


@pytest.mark.parametrize("advantage", ["gae", "none", "group", "batch"])
def test_turns_without_rewards_leave_advantages_unchanged(advantage: str) -> None:
    std = "batch" if advantage in ("group", "batch") else "none"
    settings = algorithm(advantage=advantage, advantage_std=std)
    plain = rollout()
    sizes = {"values": plain.lengths["logprobs"]}
    plain.update_(SequenceSample(plain.ids, sizes, data={"values": plain.tensor("logprobs") / 3}))
    zeros = torch.zeros_like(plain.tensor("logprobs"))
    sizes = {"turn_rewards": plain.lengths["logprobs"]}
    turns = plain.only(plain.keys)
    turns.update_(SequenceSample(plain.ids, sizes, data={"turn_rewards": zeros}))
    for name in ("advantages", "returns"):
        both = (getattr(estimates(each, settings), name) for each in (turns, plain))
        assert torch.equal(*both)


def test_overlong_penalty_equals_dapo() -> None:
    """Compares with equation 13 for a limit of 10 tokens and a buffer of 4."""
    lengths = torch.tensor([1, 6, 7, 8, 10, 12])
    assert overlong_penalty(lengths, 10, 4).tolist() == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
