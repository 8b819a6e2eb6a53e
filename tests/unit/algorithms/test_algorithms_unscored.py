"""Completions without a score (NaN) are ignored as if they did not exist."""

from __future__ import annotations

from math import nan

import pytest
import torch

from slurmrl.algorithms.policy.advantages import find_responses, only_scored, trained_completions
from slurmrl.algorithms.rule_reward import score_records
from slurmrl.algorithms.scalars import PolicyScalars
from slurmrl.algorithms.summaries import of_completions, summarize
from slurmrl.config.schema import Dataset, Evaluation
from slurmrl.data.sample import SequenceSample
from slurmrl.plan.dataflow import Measure
from tests.unit.algorithms.test_algorithms_baselines import algorithm, estimates, rollout
from tests.unit.algorithms.test_algorithms_filters import filtered
from tests.unit.algorithms.test_algorithms_whole_steps import Case

WITH = [[(2, 3), (2, 1), (2, 5)], [(1, 8), (1, 2)]]
WITHOUT = [[(2, 3), (2, 5)], [(1, 8)]]


def sample_of(shapes: list[list[tuple[int, int]]], rewards: list[float]) -> SequenceSample:
    sample = rollout(shapes)
    sample.data["rewards"] = torch.tensor(rewards, dtype=torch.float64)
    sample.data["finished"] = torch.ones(len(rewards), dtype=torch.bool)
    sample.data["greedy_rewards"] = torch.tensor([0.25, 0.5], dtype=torch.float64)
    return sample


@pytest.mark.parametrize("std", ["none", "group", "batch"])
@pytest.mark.parametrize("advantage", ["group", "leave_one_out", "batch"])
def test_advantages_ignore_unscored_completions(advantage: str, std: str) -> None:
    settings = algorithm(name="grpo", advantage=advantage, advantage_std=std, kl={"coef": 0.0})
    left = only_scored(sample_of(WITH, [1.0, nan, 0.25, 2.0, nan]))
    found, wanted = (
        estimates(each, settings) for each in (left, sample_of(WITHOUT, [1.0, 0.25, 2.0]))
    )
    assert found.advantages.tolist() == pytest.approx(wanted.advantages.tolist())
    assert found.returns.tolist() == pytest.approx(wanted.returns.tolist())


def test_losses_ignore_unscored_completions() -> None:
    """Completions whose prompt's greedy completion has no score are ignored too."""
    sample = sample_of(WITH, [1.0, nan, 0.25, 2.0, 1.0])
    sample.data["greedy_rewards"] = torch.tensor([0.5, nan], dtype=torch.float64)
    left = only_scored(sample)
    responses = find_responses(left.tensor("prompt_mask"), left.cu_seqlens("prompt_mask"))
    assert responses.cu_seqlens.diff().tolist() == [3, 0, 5, 0, 0]
    assert trained_completions(left, algorithm()).all()
    assert torch.isfinite(estimates(left, algorithm(advantage="greedy")).advantages).all()
    assert (
        only_scored(sample_of(WITH, [1.0] * 5))
        .tensor("prompt_mask")
        .equal(sample.tensor("prompt_mask"))
    )


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_step_stays_finite_with_unscored_completions(name: str) -> None:
    """Actor and critic do not train on these completions."""
    case = Case.draw(name, 1)
    case.batch.sample.tensor("rewards")[1::2] = nan
    tables = [table for result in case.run() for table in result.tables.values()]
    assert all(table.isfinite().all() for table in tables)


def test_kl_per_completion_ignores_unscored_completions() -> None:
    """Otherwise, a reward that often fails would lower the KL that `kl.kind: adaptive` sees."""
    case = Case.draw("grpo", 1)
    sample = case.batch.sample
    rewards = sample.tensor("rewards")
    rewards[1::2] = nan
    written = (~sample.tensor("prompt_mask")).split(sample.cu_seqlens("input_ids").diff().tolist())
    lengths = [int(each.sum()) for each in written[::2] if each.any()]
    stats = case.run()[0].stats
    assert stats["kl_sequence"] * len(lengths) == pytest.approx(stats["kl"] * sum(lengths))
    rewards[:] = nan
    stats = case.run()[0].stats
    assert stats["completions"] == len(rewards)
    controller = PolicyScalars(algorithm(kl={"kind": "adaptive"}))
    controller.update(stats)
    assert controller.values() == {"kl_coef": 0.1}, "the step says nothing about the KL"


def test_filters_leave_out_unscored_completions() -> None:
    """A prompt whose other scores are equal has no gradient."""
    rewards = [1.0, nan, 1.0, 0.0, nan, 1.0, 0.0, nan, nan]
    counts = [3, 3, 3]
    sample = SequenceSample(
        ("a", "b", "c"),
        {
            "prompt_mask": [[2] * count for count in counts],
            **{key: [[1] * count for count in counts] for key in ("rewards", "finished")},
        },
        data={
            "prompt_mask": torch.tensor([True, False] * 9),
            "rewards": torch.tensor(rewards),
            "finished": torch.ones(9, dtype=torch.bool),
        },
    )
    assert filtered(sample, zero_variance="drop").dropped == {
        "a": "zero_variance",
        "c": "zero_variance",
    }


def test_evaluations_are_means_over_scored_completions() -> None:
    """A prompt with an unscored completion has no pass@k."""
    evaluation = Evaluation(dataset=Dataset(type="prompt_answer", path="x"), n=2, pass_score=1.0)
    scores = [1.0, 0.0, None, 1.0, None, None]
    records = score_records("abc", [2, 2, 2], scores, ["x"] * 6, evaluation)
    assert [record.get("reward") for record in records.values()] == [0.5, 1.0, None]
    lines = [{"id": name, **record} for name, record in records.items()]
    measures = {"reward": Measure.REWARD, "pass@1": Measure.RATE}
    found = summarize(lines, measures).estimates
    assert {name: estimate.value for name, estimate in found.items()} == {
        "reward": 0.75,
        "pass@1": 0.5,
    }
    completions = [{"text": "x", "reward": score} for score in scores]
    recorded = [{"id": n, "completions": completions[2 * n : 2 * n + 2]} for n in range(3)]
    summary = of_completions(recorded, n=2, pass_score=1.0, pattern=None)
    assert summary.estimates["avg@2"].value == 0.75
    assert summary.estimates["pass@1"].value == 0.5
