"""Token rewards, scores, GAE inputs and whitening, against loops over single sequences."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmrl.algorithms.base import CallContext
from slurmrl.algorithms.policy.advantages import (
    Estimates,
    estimate,
    find_responses,
    moments,
    shape_scores,
    whiten,
)
from slurmrl.algorithms.policy.schema import PolicyGradient
from slurmrl.config.schema import Rollout
from slurmrl.data.sample import SequenceSample
from tests.support.tabular_engine import RankThreads


def batch(shapes: list[tuple[int, int]], seed: int = 0) -> SequenceSample:
    """Sequences of (prompt tokens, response tokens) with random numbers."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [prompt + response for prompt, response in shapes]
    total = sum(lengths)

    def noise(n: int) -> torch.Tensor:
        return torch.randn(n, generator=generator, dtype=torch.float64)

    mask = [[True] * prompt + [False] * response for prompt, response in shapes]
    return SequenceSample.from_default(
        lengths,
        [str(index) for index in range(len(shapes))],
        {
            "input_ids": torch.arange(total),
            "prompt_mask": torch.tensor([bit for row in mask for bit in row]),
            "logprobs": noise(total),
            "ref_logprobs": noise(total),
            "values": noise(total),
        },
        per_sequence={
            "rewards": noise(len(shapes)),
            "finished": torch.rand(len(shapes), generator=generator) < 0.5,
        },
    )


def estimates_of(
    sample: SequenceSample, algorithm: PolicyGradient, kl_coef: float = 0.0, limit: int = 8
) -> Estimates:
    """The estimates on one rank; completions may have ``limit`` tokens."""
    config = SimpleNamespace(rollout=Rollout(max_new_tokens=limit))
    settings: Any = SimpleNamespace(algorithm=algorithm, config=config)
    context = CallContext(1, 1, {"kl_coef": kl_coef}, settings, settings, (), sample.ids)
    return estimate(sample, context, lambda x: x)


def one_by_one(
    sample: SequenceSample, ppo: PolicyGradient, kl_coef: float
) -> tuple[list[float], list[float]]:
    """Advantages and returns of all response tokens, sequence by sequence, step by step."""
    advantages: list[float] = []
    returns: list[float] = []
    for item in (sample.take([index]) for index in range(sample.bs)):
        key = {name: item.tensor(name).tolist() for name in item.keys}
        response = [t for t, is_prompt in enumerate(key["prompt_mask"]) if not is_prompt]
        carry, rows = 0.0, []
        for t in reversed(response):
            last = t == response[-1]
            reward = -kl_coef * (key["logprobs"][t] - key["ref_logprobs"][t])
            reward += key["rewards"][0] if last else 0.0
            following = key["values"][t] if not (last and key["finished"][0]) else 0.0
            delta = reward + ppo.discount * following - key["values"][t - 1]
            carry = delta + ppo.discount * ppo.gae_lambda * carry
            rows.append((carry, carry + key["values"][t - 1]))
        advantages += [a for a, _ in reversed(rows)]
        returns += [r for _, r in reversed(rows)]
    return advantages, returns


shapes = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 6)), min_size=1, max_size=6)


@settings(deadline=None)
@given(shapes, st.floats(0, 1), st.floats(0, 1), st.floats(0, 2), st.integers(0, 99))
def test_estimates_are_those_of_single_sequences(
    rows: list[tuple[int, int]], discount: float, lam: float, kl_coef: float, seed: int
) -> None:
    ppo = PolicyGradient(batch_size=8, discount=discount, gae_lambda=lam, reward_clip=None)
    sample = batch(rows, seed)
    estimates = estimates_of(sample, ppo, kl_coef)
    advantages, returns = one_by_one(sample, ppo, kl_coef)
    torch.testing.assert_close(estimates.advantages, torch.tensor(advantages, dtype=torch.float64))
    torch.testing.assert_close(estimates.returns, torch.tensor(returns, dtype=torch.float64))


def test_states_stand_before_their_tokens() -> None:
    sample = batch([(2, 3), (1, 1), (3, 0)])
    found = find_responses(sample.tensor("prompt_mask"), sample.cu_seqlens("input_ids"))
    assert found.tokens.tolist() == [2, 3, 4, 6]
    assert found.states.tolist() == [1, 2, 3, 4, 5, 6, 9]
    assert found.cu_seqlens.tolist() == [0, 3, 4, 4]
    assert found.last.tolist() == [2, 3]
    assert found.answered.tolist() == [0, 1]


def test_an_empty_batch_has_no_estimates() -> None:
    sample = batch([(2, 3)]).take([])
    estimates = estimates_of(sample, PolicyGradient(batch_size=8), 0.1)
    assert estimates.advantages.shape == (0,)
    assert moments(estimates.advantages, lambda x: x) == (0.0, 0.0)


def test_scores_are_shifted_scaled_clipped_in_this_order() -> None:
    ppo = PolicyGradient(batch_size=8, reward_bias=1.0, reward_scaling=2.0, reward_clip=3.0)
    scores = shape_scores(
        torch.tensor([2.0, 9.0, -9.0]), torch.tensor([True] * 3), torch.ones(3), ppo, 8
    )
    assert scores.tolist() == [2.0, 3.0, -3.0]


@pytest.mark.parametrize(("mask", "wanted"), [(False, [1.0, 1.0]), (True, [1.0, 0.0])])
def test_unfinished_completions_keep_their_score_unless_masked(
    mask: bool, wanted: list[float]
) -> None:
    ppo = PolicyGradient(batch_size=8, mask_no_eos_with_zero=mask)
    assert (
        shape_scores(torch.ones(2), torch.tensor([True, False]), torch.ones(2), ppo, 8).tolist()
        == wanted
    )


def moments_on_ranks(parts: list[torch.Tensor]) -> list[tuple[float, float]]:
    ranks = RankThreads(len(parts))
    return ranks.run(lambda rank: moments(parts[rank], partial(ranks.sum, rank)))


def test_whitening_uses_the_moments_of_all_ranks() -> None:
    parts = [torch.tensor([1.0, 2.0, 6.0]), torch.tensor([3.0]), torch.tensor([])]
    whole, found = torch.cat(parts), moments_on_ranks(parts)
    mean, std = found[0]
    assert found == [(mean, std)] * 3
    assert mean == pytest.approx(float(whole.mean()))
    assert std == pytest.approx(float(whole.std(correction=0)))
    white = whiten(whole, mean, std)
    assert float(white.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(white.std(correction=0)) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_moments_of_equal_numbers_are_exact_on_any_layout(dtype: torch.dtype) -> None:
    for sizes in ((7,), (3, 4), (0, 6, 5), (1, 1, 1)):
        for value in (0.1, 1 / 3, -0.7, 1e8 + 0.1, 3e-12, 0.0):
            parts = [torch.full((size,), value, dtype=dtype) for size in sizes]
            for mean, std in moments_on_ranks(parts):
                assert std == 0.0
                assert not whiten(torch.cat(parts), mean, std).any()


def test_whitening_leaves_rounding_small() -> None:
    assert float(whiten(torch.tensor([1e-8, -1e-8]), 0.0, 1e-8).abs().max()) < 2e-4
