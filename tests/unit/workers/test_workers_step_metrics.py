"""Tests of the metrics of a step, computed from the answers of the ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from slurmrl.plan.dataflow import Method
from slurmrl.plan.model import CallPlan
from slurmrl.workers.master import publish
from slurmrl.workers.messages import Done


def answer(seconds: float = 1.0, tokens: int = 0, texts: Any = (), **stats: Any) -> Done:
    return Done(rank=0, seq=0, seconds=seconds, tokens=tokens, stats=stats, texts=tuple(texts))


def test_means_are_weighted_by_count_over_all_ranks(calls: Callable[..., CallPlan]) -> None:
    """The result is the mean over items, and not the mean of the ranks' means."""
    answers = {0: answer(reward=(3.0, 3)), 1: answer(reward=(0.0, 1))}
    assert publish.mean_stats(calls("reward_inf"), answers) == {"reward": 0.75}


def test_ranks_without_samples_do_not_change_means(calls: Callable[..., CallPlan]) -> None:
    answers = {0: answer(reward=(0.0, 0), length=(6.0, 2)), 1: answer()}
    assert publish.mean_stats(calls("gen"), answers) == {"length": 3.0}


def test_step_metrics_combine_all_calls_and_ranks(calls: Callable[..., CallPlan]) -> None:
    gen, train = calls("gen"), calls("train", method=Method.TRAIN_STEP)
    found = publish.of_step(
        [
            (gen, {0: answer(0.5, 10, length=(4.0, 2)), 1: answer(0.75, 20, length=(6.0, 2))}),
            (train, {0: answer(2.0, 30, loss=(0.1, 1)), 1: answer(1.0, 50, loss=(0.1, 1))}),
        ],
        step_s=4.0,
    )
    assert found == {
        "length": 2.5,
        "loss": 0.1,
        "tokens": 80,
        "tokens_per_s": pytest.approx(20.0),
        "time/step": 4.0,
        "time/gen": 0.75,
        "time/train": 2.0,
    }


def test_texts_of_all_calls_are_joined_in_rank_order(calls: Callable[..., CallPlan]) -> None:
    first = {1: answer(texts=[{"id": "b"}]), 0: answer(texts=[{"id": "a"}])}
    second = {0: answer(), 1: answer(texts=[{"id": "c"}])}
    found = publish.texts([(calls("one"), first), (calls("two"), second)])
    assert [text["id"] for text in found] == ["a", "b", "c"]


def test_notes_of_any_call_are_added_to_their_samples(calls: Callable[..., CallPlan]) -> None:
    judge = {0: answer(texts=[{"id": "a"}, {"id": "b", "index": 1}])}
    train = {
        0: Done(
            rank=0,
            seq=0,
            seconds=1.0,
            notes=(
                {"id": "b", "index": 1, "values": 1},
                {"id": "a", "index": 0, "values": 2},
                {"id": "a", "index": 3, "values": 3},
            ),
        )
    }
    found = publish.texts(
        [(calls("judge", ranks=(0,)), judge), (calls("train", ranks=(0,)), train)]
    )
    assert found == [{"id": "a", "values": 2}, {"id": "b", "index": 1, "values": 1}]


def test_samples_with_any_content_are_valid_json() -> None:
    rows = [{"id": "a@0", "reward": float("nan"), "turns": [{"reward": float("inf")}]}]
    lines = publish.sample_lines(3, rows).splitlines()

    def reject(token: str) -> None:
        raise AssertionError(f"{token} is no JSON")

    assert [json.loads(line, parse_constant=reject) for line in lines] == [
        {"step": 3, "id": "a@0", "reward": None, "turns": [{"reward": None}]}
    ]


def test_suite_metrics_have_the_suite_name() -> None:
    metrics = {"reward": 0.5, "time/step": 3.0, "time/actor_gen": 1.0}
    wanted = {"eval/gsm8k/reward": 0.5, "time/evaluation/gsm8k": 3.0}
    assert publish.of_evaluation(metrics, "gsm8k") == wanted


def test_evaluation_keeps_all_metrics_except_call_times() -> None:
    """Also covers metrics with a slash in their names, such as ``rewards/accuracies``."""
    metrics = {"rewards/accuracies": 0.5, "loss": 1.0, "time/step": 3.0, "time/actor_compare": 2.0}
    assert publish.of_evaluation(metrics) == {
        "eval/rewards/accuracies": 0.5,
        "eval/loss": 1.0,
        "time/evaluation": 3.0,
    }
