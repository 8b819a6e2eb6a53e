"""Filters of prompts by what their completions earned."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from slurmrl.algorithms.base import CallContext
from slurmrl.algorithms.policy.filters import FilterInterface, reason
from slurmrl.algorithms.policy.schema.filters import Filters
from slurmrl.data.sample import SequenceSample

DROP = Filters(zero_variance="drop")


@pytest.mark.parametrize(
    ("settings", "rewards", "finished", "expected"),
    [
        (Filters(), [1.0, 1.0], [False, False], None),
        (DROP, [1.0, 1.0], [True, False], "zero_variance"),
        (DROP, [0.25, 0.5], [False, False], None),
        (DROP, [0.0, 0.0, 0.0, 1e-3], [True] * 4, None),
        (Filters(max_truncated=0.5), [1.0, 0.0], [True, False], None),
        (Filters(max_truncated=0.5), [1.0, 0.0, 0.5], [True, False, False], "truncated"),
        (Filters(max_truncated=0.0), [1.0, 0.0], [True, False], "truncated"),
        (Filters(max_truncated=0.0), [1.0, 1.0], [True, True], None),
        (
            Filters(max_truncated=0.0, zero_variance="drop"),
            [1.0, 1.0],
            [True, True],
            "zero_variance",
        ),
        (Filters(max_truncated=0.0, zero_variance="drop"), [1.0] * 2, [False] * 2, "truncated"),
    ],
)
def test_a_prompt_is_dropped_for_a_reason(
    settings: Filters, rewards: list[float], finished: list[bool], expected: str | None
) -> None:
    assert reason(rewards, finished, settings) == expected


def test_each_prompt_is_judged_by_its_own_completions() -> None:
    """Groups of different sizes; the metrics are shares of prompts. A rank may have none."""
    settings: Any = SimpleNamespace(algorithm=Filters(zero_variance="drop", max_truncated=0.5))
    context = cast(CallContext, SimpleNamespace(settings=settings))
    sample = SequenceSample(
        ("a@0", "b@0", "c@0", "d@0"),
        _lengths([2, 3, 2, 1]),
        data={
            "prompt_mask": torch.tensor([True, False] * 8),
            "rewards": torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0]),
            "finished": torch.tensor([True, True, True, True, True, False, False, True]),
        },
    )
    result = FilterInterface().filter(None, sample, context)
    assert result.dropped == {"b@0": "zero_variance", "c@0": "truncated", "d@0": "zero_variance"}
    assert result.stats == {"filter/zero_variance": (2.0, 4.0), "filter/truncated": (1.0, 4.0)}
    nothing = FilterInterface().filter(None, sample.take([]), context)
    assert nothing.dropped == {}
    assert nothing.stats == {"filter/zero_variance": (0.0, 0.0), "filter/truncated": (0.0, 0.0)}


def test_failed_episodes_are_left_out_of_the_comparison() -> None:
    """Their reward of 0 is no judgement: where the other completions got equal rewards, or there is
    no other, the prompt is dropped. A failed episode is not a truncated one either."""
    settings: Any = SimpleNamespace(algorithm=Filters(zero_variance="drop", max_truncated=0.5))
    context = cast(CallContext, SimpleNamespace(settings=settings))
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
    result = FilterInterface().filter(None, sample, context)
    assert result.dropped == dict.fromkeys(["equal@0", "alone@0", "none@0"], "zero_variance")


def _lengths(counts: list[int]) -> dict[str, list[list[int]]]:
    """Sequences of two tokens, a prompt's and a response's."""
    each = {key: [[1] * count for count in counts] for key in ("rewards", "finished")}
    return each | {"prompt_mask": [[2] * count for count in counts]}
