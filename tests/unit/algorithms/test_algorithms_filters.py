"""Filters of prompts by the rewards of their completions."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slurmrl.algorithms.base import CallContext, CallResult
from slurmrl.algorithms.policy.advantages import FilterInterface, reason
from slurmrl.algorithms.policy.hyperparameters import Filters
from slurmrl.algorithms.policy.schema import PolicyGradient
from slurmrl.config.schema import Rollout
from slurmrl.data.sample import SequenceSample
from slurmrl.plan.dataflow import Refill
from tests.support.policy_batches import VOCABULARY, Batch
from tests.support.policy_reference import Reference

LIMIT = 6
ROUNDS = {"filter_rounds": 3, "filter_candidates": 7, "short_batch": "error"}
DROP = Filters(zero_variance="drop")
MASK = Filters(zero_variance="drop", mask_truncated=True)


def test_refill_settings_reach_the_step() -> None:
    settings = Filters.model_validate({"max_truncated": 0.5, **ROUNDS})
    assert settings.refill() == Refill(rounds=3, candidates=7, complete=True)
    assert DROP.refill() == Refill(rounds=10, candidates=None, complete=False)


@pytest.mark.parametrize(
    ("settings", "scores", "finished", "expected"),
    [
        (Filters(), [1.0, 1.0], [False, False], None),
        (DROP, [1.0, 1.0], [True, False], "zero_variance"),
        (DROP, [0.0, 0.0, 0.0, 1e-3], [True] * 4, None),
        (DROP, [0.0, -0.0], [True] * 2, "zero_variance"),
        (DROP, [1.0], [True], "zero_variance"),
        (MASK, [0.25, 0.5], [False, False], "truncated"),
        (MASK, [0.25, 0.5], [True, False], None),
        (MASK, [], [], "zero_variance"),
        (Filters(max_truncated=0.5), [1.0, 0.0], [True, False], None),
        (Filters(max_truncated=0.5), [1.0, 0.0, 0.5], [True, False, False], "truncated"),
        (Filters(max_truncated=0.0), [1.0, 0.0], [True, False], "truncated"),
        (
            Filters(max_truncated=0.0, zero_variance="drop"),
            [1.0, 1.0],
            [True, True],
            "zero_variance",
        ),
        (Filters(max_truncated=0.0, zero_variance="drop"), [1.0] * 2, [False] * 2, "truncated"),
    ],
)
def test_dropped_prompt_has_a_reason(
    settings: Filters, scores: list[float], finished: list[bool], expected: str | None
) -> None:
    assert reason(scores, finished, settings) == expected


def filtered(sample: SequenceSample, **options: Any) -> CallResult:
    algorithm = PolicyGradient(batch_size=8, name="grpo", **options)
    config = SimpleNamespace(rollout=Rollout(n=2, max_new_tokens=LIMIT))
    settings: Any = SimpleNamespace(algorithm=algorithm, config=config)
    context = CallContext(1, 1, {}, settings, settings, (), sample.ids)
    return FilterInterface().filter(None, sample, context)


def test_filter_decides_per_prompt_by_its_own_completions() -> None:
    """Covers groups of different sizes. The metrics are shares of prompts."""
    sample = SequenceSample(
        ("a@0", "b@0", "c@0", "d@0"),
        _lengths([2, 3, 2, 1]),
        data={
            "prompt_mask": torch.tensor([True, False] * 8),
            "rewards": torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0]),
            "finished": torch.tensor([True, True, True, True, True, False, False, True]),
        },
    )
    result = filtered(sample, zero_variance="drop", max_truncated=0.5)
    assert result.dropped == {"b@0": "zero_variance", "c@0": "truncated", "d@0": "zero_variance"}
    assert result.stats == {"filter/zero_variance": (2.0, 4.0), "filter/truncated": (1.0, 4.0)}
    nothing = filtered(sample.take([]), zero_variance="drop")
    assert nothing.dropped == {}
    assert nothing.stats == {"filter/zero_variance": (0.0, 0.0), "filter/truncated": (0.0, 0.0)}


def test_filters_ignore_failed_episodes() -> None:
    """Its reward 0 is no score, and it does not count as truncated."""
    wrote = [[True, True, False], [True, False], [False, False], [True, True, False, False]]
    sample = SequenceSample(
        ("equal@0", "alone@0", "none@0", "differ@0"),
        _lengths([len(each) for each in wrote]),
        data={
            "prompt_mask": torch.tensor(
                [read for group in wrote for each in group for read in (True, not each)]
            ),
            "rewards": torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.5, 0.0, 0.0]),
            "finished": torch.tensor([each for group in wrote for each in group]),
        },
    )
    result = filtered(sample, zero_variance="drop", max_truncated=0.5)
    assert result.dropped == dict.fromkeys(["equal@0", "alone@0", "none@0"], "zero_variance")


def _lengths(counts: list[int]) -> dict[str, list[list[int]]]:
    """Return sequences of two tokens: one of the prompt and one of the response."""
    each = {key: [[1] * count for count in counts] for key in ("rewards", "finished")}
    return each | {"prompt_mask": [[2] * count for count in counts]}


SHAPING: tuple[dict[str, Any], ...] = (
    {},
    {"reward_clip": 0.25},  # makes different rewards equal
    {"mask_no_eos_with_zero": True},
    {"overlong_buffer": 4},  # makes equal rewards different
    {"overlong_buffer": 2, "reward_clip": 0.5, "reward_bias": 0.25},
)


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("shaping", SHAPING, ids=str)
def test_filter_drops_exactly_prompts_without_gradient(shaping: dict[str, Any], mask: bool) -> None:
    """A prompt has no gradient if all its trained tokens have an advantage of 0."""
    algorithm = PolicyGradient(
        batch_size=8, name="grpo", kl={"coef": 0.0}, mask_truncated=mask, **shaping
    )
    table = torch.zeros(VOCABULARY, VOCABULARY)
    dropped, kept = set(), set()
    for seed in range(20):
        batch = Batch.draw(algorithm, Random(seed), table, 1.0, LIMIT)
        reference = Reference(algorithm, batch.prompts, LIMIT, 1.0, 0.0, recomputes=False)
        advantages = reference.estimates().advantages
        silent = {
            prompt.name
            for prompt in batch.prompts
            if not any(
                any(advantages[id(each)]) for each in prompt.completions if reference.trained(each)
            )
        }
        found = filtered(batch.sample, zero_variance="drop", mask_truncated=mask, **shaping).dropped
        assert set(found) == silent, seed
        dropped |= {(seed, name) for name in silent}
        kept |= {(seed, prompt.name) for prompt in batch.prompts if prompt.name not in silent}
    assert len(dropped) > 10 < len(kept)
