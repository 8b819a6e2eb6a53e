"""Advantages without a critic, against loops over single completions in float64."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from math import exp
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from slurmrl.algorithms.base import CallContext
from slurmrl.algorithms.policy.advantages import Estimates, estimate, overlong_penalty
from slurmrl.algorithms.policy.schema import PolicyGradient
from slurmrl.algorithms.policy.sections import OF_COMPLETIONS
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


def penalty(x: float, estimator: str) -> float:
    values = {"k1": x, "k2": x * x / 2, "k3": exp(-x) - 1 + x}
    return KL_COEF * values[estimator]


def token_penalties(sample: SequenceSample, settings: PolicyGradient) -> list[list[float]]:
    """Of each response token of each completion."""
    logp, ref = sample.tensor("logprobs").tolist(), sample.tensor("ref_logprobs").tolist()
    mask = sample.tensor("prompt_mask").tolist()
    cuts = sample.cu_seqlens("input_ids").tolist()
    return [
        [
            penalty(logp[t] - ref[t], settings.kl.estimator) if settings.kl.coef else 0.0
            for t in range(start, stop)
            if not mask[t]
        ]
        for start, stop in pairwise(cuts)
    ]


def deviation(values: Sequence[float], settings: PolicyGradient) -> float:
    spread = statistics.stdev(values) if settings.std_unbiased else statistics.pstdev(values)
    return spread + settings.std_epsilon


def of_completions(sample: SequenceSample, settings: PolicyGradient) -> list[float]:
    """The advantages of all response tokens where a completion has one return."""
    penalties, counts = token_penalties(sample, settings), sample.sequence_counts("input_ids")
    rewards = sample.tensor("rewards").tolist()
    returns = [reward - sum(row) for reward, row in zip(rewards, penalties, strict=True)]
    advantages: list[float] = []
    first = 0
    for count in counts:
        group = returns[first : first + count]
        for place, value in enumerate(group):
            own = first + place
            baseline = {
                "group": group,
                "leave_one_out": group[:place] + group[place + 1 :],
                "batch": returns,
                "batch_leave_one_out": returns[:own] + returns[own + 1 :],
            }
            advantage = value - statistics.fmean(baseline[settings.advantage])
            if settings.advantage_std != "none":
                spread = group if settings.advantage_std == "group" else returns
                advantage /= deviation(spread, settings)
            advantages += [advantage] * len(penalties[first + place])
        first += count
    return advantages


def of_tokens(sample: SequenceSample, settings: PolicyGradient) -> list[float]:
    """The advantages of all response tokens where each token has a return."""
    counts = sample.sequence_counts("input_ids")
    group = [item for item, count in enumerate(counts) for _ in range(count)]
    greedy = sample.tensor("greedy_rewards").tolist()
    advantages: list[float] = []
    for number, row in enumerate(token_penalties(sample, settings)):
        following, returns = 0.0, []
        for place in reversed(range(len(row))):
            reward = float(sample.tensor("rewards")[number]) if place == len(row) - 1 else 0.0
            following = reward - row[place] + settings.discount * following
            returns.append(following)
        baseline = greedy[group[number]] if settings.advantage == "greedy" else 0.0
        advantages += [value - baseline for value in reversed(returns)]
    return advantages


@pytest.mark.parametrize("kl", [{"coef": 0.0}, {"estimator": "k1"}, {"estimator": "k3"}])
@pytest.mark.parametrize("std", ["none", "group", "batch"])
@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize("advantage", OF_COMPLETIONS)
def test_completions_are_compared_as_the_formulas_say(
    advantage: str, unbiased: bool, std: str, kl: dict[str, Any]
) -> None:
    """Every baseline with every standard deviation gives what a loop over completions gives."""
    spread = {} if std == "none" else {"std_unbiased": unbiased, "std_epsilon": 0.01}
    settings = algorithm(advantage=advantage, advantage_std=std, kl=kl, **spread)
    sample = rollout()
    advantages = estimates(sample, settings).advantages
    wanted = torch.tensor(of_completions(sample, settings), dtype=torch.float64)
    torch.testing.assert_close(advantages, wanted)


EQUAL = (0.1, 1 / 3, -0.7, 5.0, 1e-3)


@pytest.mark.parametrize("std", ["none", "group", "batch"])
@pytest.mark.parametrize("advantage", OF_COMPLETIONS)
@pytest.mark.parametrize("epsilon", [0.0, 1e-6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_advantages_are_exactly_zero_in_groups_of_equal_scores(
    advantage: str, std: str, epsilon: float, dtype: torch.dtype
) -> None:
    """On any number of ranks; rounding would become a full step of Adam.

    Compared within a group, the others do not matter; compared with the batch, all are equal.
    """
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


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("discount", [1.0, 0.9])
@pytest.mark.parametrize("advantage", ["none", "greedy"])
def test_tokens_have_the_return_from_there_on(
    advantage: str, discount: float, estimator: str
) -> None:
    settings = algorithm(advantage=advantage, discount=discount, kl={"estimator": estimator})
    sample = rollout()
    advantages = estimates(sample, settings).advantages
    wanted = torch.tensor(of_tokens(sample, settings), dtype=torch.float64)
    torch.testing.assert_close(advantages, wanted)


@pytest.mark.parametrize("std", ["group", "batch"])
@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize("discount", [1.0, 0.9])
def test_returns_without_baseline_are_divided_by_their_deviation_from_0(
    std: str, unbiased: bool, discount: float
) -> None:
    """The root of the mean square of the completions' whole returns, on any number of ranks."""
    spread = {"advantage_std": std, "std_unbiased": unbiased, "std_epsilon": 0.01}
    settings = algorithm(advantage="none", discount=discount, **spread)
    sample = rollout()
    penalties = token_penalties(sample, settings)
    rewards = sample.tensor("rewards").tolist()
    whole = [reward - sum(row) for reward, row in zip(rewards, penalties, strict=True)]
    wanted: list[float] = []
    plain = iter(of_tokens(sample, settings))
    for number, row in enumerate(penalties):
        among = whole[number - number % 3 :][:3] if std == "group" else whole
        mean_square = sum(x * x for x in among) / (len(among) - unbiased)
        wanted += [next(plain) / (mean_square**0.5 + 0.01) for _ in row]
    found = estimates(sample, settings).advantages
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64))
    parts = advantages_on_ranks(sample, settings, 3)
    torch.testing.assert_close(torch.cat(parts), found)


class Operators(TorchDispatchMode):
    """The names of slurmrl's own operators that were called."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "slurmrl":
            self.called.append(func.name())
        return func(*args, **(kwargs or {}))


def test_returns_without_a_critic_are_one_scan_over_the_rewards() -> None:
    """No values are gathered for them, not even where the batch has some of another critic."""
    sample = rollout()
    values = torch.full_like(sample.tensor("logprobs"), 5.0)
    lengths = {"values": sample.lengths["input_ids"]}
    sample.update_(SequenceSample(sample.ids, lengths, data={"values": values}))
    settings = algorithm(advantage="none", discount=0.9, kl={"coef": 0.0})
    with Operators() as operators:
        advantages = estimates(sample, settings).advantages
    assert operators.called == ["slurmrl::scan"]
    wanted = torch.tensor(of_tokens(sample, settings), dtype=torch.float64)
    torch.testing.assert_close(advantages, wanted)


def test_a_group_by_hand() -> None:
    """Rewards 1, 0, 0: mean 1/3, others' means 0 and 1/2, unbiased std sqrt(1/3)."""
    sample = rollout([[(1, 1), (1, 2), (1, 1)]])
    sample.data["rewards"] = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)

    def advantages(**options: Any) -> list[float]:
        settings = algorithm(kl={"coef": 0.0}, **options)
        values: list[float] = estimates(sample, settings).advantages.tolist()
        return values

    root = 3**0.5
    wanted = {
        ("group", "none"): [2 / 3, -1 / 3, -1 / 3, -1 / 3],
        ("leave_one_out", "none"): [1.0, -0.5, -0.5, -0.5],
        ("group", "group"): [2 / root, -1 / root, -1 / root, -1 / root],
    }
    for (advantage, std), values in wanted.items():
        assert advantages(advantage=advantage, advantage_std=std) == pytest.approx(values, rel=1e-5)


@pytest.mark.parametrize("advantage", OF_COMPLETIONS)
@pytest.mark.parametrize("std", ["none", "group", "batch"])
@pytest.mark.parametrize("reward", [0.1, 1e6])
def test_equal_rewards_give_no_advantage(advantage: str, std: str, reward: float) -> None:
    """Rounding errors of the mean must not be divided by a vanishing standard deviation."""
    sample = rollout()
    sample.data["rewards"] = torch.full_like(sample.tensor("rewards"), reward)
    settings = algorithm(advantage=advantage, advantage_std=std, kl={"coef": 0.0})
    assert float(estimates(sample, settings).advantages.abs().max()) < 1e-3


@pytest.mark.parametrize(
    ("advantage", "std"), [("group", "group"), ("group", "batch"), ("batch", "batch")]
)
def test_advantages_do_not_depend_on_ranks_or_order(advantage: str, std: str) -> None:
    """Any distribution of whole groups over ranks gives each completion the same advantage, also a
    rank without items.
    """
    settings = algorithm(advantage=advantage, advantage_std=std)
    sample = rollout()
    whole = estimates(sample, settings).advantages
    sizes = [sum(response for _, response in group) for group in SHAPES]
    rows = dict(enumerate(whole.split(sizes)))
    shares = [[2, 0], [], [1]]

    ranks = RankThreads(3)

    def work(rank: int) -> Tensor:
        return estimates(sample.take(shares[rank]), settings, partial(ranks.sum, rank)).advantages

    for share, own in zip(shares, ranks.run(work), strict=True):
        wanted = torch.cat([rows[item] for item in share]) if share else whole[:0]
        torch.testing.assert_close(own, wanted)


def test_a_greedy_baseline_is_shaped_like_the_scores() -> None:
    """Bias, scale and overlong penalty apply to both, so an equal completion has no advantage."""
    sample = rollout([[(2, 2)]])
    sample.data["greedy_rewards"] = sample.tensor("rewards").clone()
    settings = algorithm(
        advantage="greedy", reward_bias=0.5, reward_scaling=3.0, overlong_buffer=8, kl={"coef": 0.0}
    )
    advantages = estimates(sample, settings).advantages
    torch.testing.assert_close(advantages, torch.zeros_like(advantages))


def test_a_penalty_in_the_loss_leaves_the_rewards_alone() -> None:
    in_loss = {"where": "loss", "estimator": "k3"}
    sample = rollout()
    for advantage in ("group", "none"):
        settings = [algorithm(advantage=advantage, kl=kl) for kl in (in_loss, {"coef": 0.0})]
        penalised, free = (estimates(sample, each).advantages for each in settings)
        assert torch.equal(penalised, free)


def test_the_overlong_penalty_is_that_of_dapo() -> None:
    """Equation 13 with a limit of 10 tokens, of which 4 are the buffer."""
    lengths = torch.tensor([1, 6, 7, 8, 10, 12])
    assert overlong_penalty(lengths, 10, 4).tolist() == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]


def test_the_overlong_penalty_lowers_the_score() -> None:
    """Of 8 tokens the last 4 are the buffer: a completion of 8 loses all, one of 2 nothing."""
    sample = rollout([[(1, 8), (1, 2)]])
    sample.data["rewards"] = torch.ones(2, dtype=torch.float64)
    settings = algorithm(
        advantage="none", overlong_buffer=4, overlong_penalty=0.5, kl={"coef": 0.0}
    )
    assert estimates(sample, settings).returns.tolist() == [0.5] * 8 + [1.0] * 2


@pytest.mark.parametrize("std", ["group", "batch"])
def test_equal_rewards_give_no_advantage_without_an_epsilon(std: str) -> None:
    """0 divided by a standard deviation of 0 would be no number, and no update would be made."""
    sample = rollout()
    sample.data["rewards"] = torch.ones_like(sample.tensor("rewards"))
    settings = algorithm(advantage="group", advantage_std=std, std_epsilon=0.0, kl={"coef": 0.0})
    assert not estimates(sample, settings).advantages.any()
