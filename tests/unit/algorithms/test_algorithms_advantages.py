"""Token rewards, scores, inputs of GAE and normalization, against loops over single sequences."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slurmrl.algorithms.base import CallContext
from slurmrl.algorithms.policy.advantages import Estimates, estimate, moments, whiten
from slurmrl.algorithms.policy.schema import PolicyGradient
from slurmrl.config.schema import Rollout
from slurmrl.data.sample import SequenceSample
from tests.support.tabular_engine import RankThreads


def batch(shapes: list[tuple[int, int]], seed: int = 0) -> SequenceSample:
    """Return sequences of (prompt tokens, response tokens) with random values."""
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
    """Return the estimates on one rank. Completions may have ``limit`` tokens."""
    config = SimpleNamespace(rollout=Rollout(max_new_tokens=limit))
    settings: Any = SimpleNamespace(algorithm=algorithm, config=config)
    context = CallContext(1, 1, {"kl_coef": kl_coef}, settings, settings, (), sample.ids)
    return estimate(sample, context, lambda x: x)


def test_empty_batch_gives_empty_advantages() -> None:
    sample = batch([(2, 3)]).take([])
    estimates = estimates_of(sample, PolicyGradient(batch_size=8), 0.1)
    assert estimates.advantages.shape == (0,)
    assert moments(estimates.advantages, lambda x: x) == (0.0, 0.0)


def moments_on_ranks(parts: list[torch.Tensor]) -> list[tuple[float, float]]:
    ranks = RankThreads(len(parts))
    return ranks.run(lambda rank: moments(parts[rank], partial(ranks.sum, rank)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_moments_of_equal_numbers_are_exact_on_any_layout(dtype: torch.dtype) -> None:
    for sizes in ((7,), (3, 4), (0, 6, 5), (1, 1, 1)):
        for value in (0.1, 1 / 3, -0.7, 1e8 + 0.1, 3e-12, 0.0):
            parts = [torch.full((size,), value, dtype=dtype) for size in sizes]
            for mean, std in moments_on_ranks(parts):
                assert std == 0.0
                assert not whiten(torch.cat(parts), mean, std).any()


def test_whitening_does_not_amplify_rounding_errors() -> None:
    assert float(whiten(torch.tensor([1e-8, -1e-8]), 0.0, 1e-8).abs().max()) < 2e-4
