"""Checks of what interfaces return."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from slurmrl.algorithms.base import CallResult
from slurmrl.data.sample import SequenceSample
from slurmrl.errors import UsageError
from slurmrl.plan.model import CallPlan
from slurmrl.workers.worker.executor import checked


def sample(key: str) -> SequenceSample:
    return SequenceSample.from_default([1], ["1@0"], {key: torch.zeros(1)})


def result(stats: Any, key: str = "rewards") -> CallResult:
    return CallResult(sample(key), cast(Any, stats))


MADE = "fake:Judge.inference() of call 'judge' returned "
PAIRS = "metrics that are not a pair (sum, count) of numbers: "


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (sample("rewards"), "SequenceSample, but must return a CallResult"),
        (
            CallResult(),
            "a sample without rewards, which calls() declares as outputs; it has no keys",
        ),
        (
            result({}, "scores"),
            "a sample without rewards, which calls() declares as outputs; it has",
        ),
        (result({"loss": 0.5}), f"{PAIRS}loss"),
        (result({"loss": (torch.zeros(()), 1.0), "kl": (0.1, 1)}), f"{PAIRS}loss"),
        (result([0.5]), f"{PAIRS}stats"),
    ],
)
def test_error_about_wrong_results_names_interface_and_rule(
    calls: Callable[..., CallPlan], returned: Any, message: str
) -> None:
    call = calls("judge", role=None, outputs=("rewards",), interface="fake:Judge")
    with pytest.raises(UsageError, match=re.escape(MADE + message)):
        checked(returned, call, leads=True)
    right = result({"loss": (0.5, 2)})
    assert checked(right, call, leads=True) is right


def test_only_the_leader_rank_returns_samples(calls: Callable[..., CallPlan]) -> None:
    call = calls("judge", role=None, outputs=("rewards",), interface="fake:Judge")
    nothing = CallResult()
    assert checked(nothing, call, leads=False) is nothing
