"""Exact match, the registry, and mathematical equality."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slurmrl.errors import UnknownNameError, UsageError
from slurmrl.rewards import make
from slurmrl.rewards.exact_match import ExactMatch
from slurmrl.rewards.math import MathReward, final_answer


@pytest.fixture(scope="module")
def judged() -> Iterator[MathReward]:
    reward = MathReward(timeout_s=60.0)
    yield reward
    reward.close()


def test_exact_match_ignores_white_space_only() -> None:
    rows = [{"answer": "64"}, {"answer": "64 "}, {"answer": "64"}, {"answer": 64}]
    assert ExactMatch()(["p"] * 4, [" 64\n", "64", "6 4", "64"], rows) == [1.0, 1.0, 0.0, 1.0]


def test_names_and_options_are_checked() -> None:
    assert isinstance(make("exact_match", {}), ExactMatch)
    assert isinstance(make("slurmrl.rewards.exact_match:ExactMatch", {}), ExactMatch)
    with pytest.raises(UnknownNameError, match="did you mean 'exact_match'"):
        make("exactmatch", {})
    with pytest.raises(UsageError, match="nonsense"):
        make("math", {"nonsense": 1})
    with pytest.raises(UsageError, match="positive"):
        make("math", {"timeout_s": 0})


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("48/2 = 24\n#### 72", "72"),
        ("#### 1\nno, #### 2\nbye", "2"),
        ("72", "72"),
        ("####", ""),
    ],
)
def test_the_final_answer_stands_behind_the_last_marker(text: str, answer: str) -> None:
    assert final_answer(text, "####") == answer


CASES = [
    ("so 48+24\n#### 72", "She has 3.\n#### 72", 1.0),
    ("#### 1,000", "#### $1000", 1.0),
    ("#### 72", "#### 27", 0.0),
    ("#### 72", "I do not know", 0.0),
    ("#### 72", "", 0.0),
    ("#### 72", "72 apples, or 71\n####", 0.0),
    ("0.5", r"\boxed{\frac{1}{2}}", 1.0),
    ("#### 18", "#### 18.00", 1.0),
    ("#### -3", "#### 3", 0.0),
]


def test_answers_are_compared_as_numbers(judged: MathReward) -> None:
    references, completions, wanted = zip(*CASES, strict=True)
    rows = [{"answer": reference} for reference in references]
    assert judged(["p"] * len(CASES), completions, rows) == list(wanted)
    assert judged.stats() == {"reward_unjudged": (0.0, float(len(CASES)))}


def test_no_completions_are_judged_at_once(judged: MathReward) -> None:
    assert judged([], [], []) == []
