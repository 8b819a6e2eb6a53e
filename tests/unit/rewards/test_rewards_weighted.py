"""Weighted sums of rewards, and parts that score only some rows of a dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from pydantic import ValidationError

from slurmrl.config.changes import differences
from slurmrl.config.schema import Config, Reward
from slurmrl.config.schema.reward import RewardPart
from slurmrl.errors import RewardError
from slurmrl.rewards import REWARDS
from slurmrl.rewards.weighted import WeightedReward, applies, make_reward
from tests.support.trials import ppo_config

MODULE = "tests.support.users_rewards"
FAILING = "tests.support.failing_rewards:score"
LENGTHS = {"name": f"{MODULE}:asynchronous"}
ROWS = [
    {"answer": "a", "source": "one"},
    {"answer": "b", "source": "two"},
    {"answer": "x", "source": "one"},
]


Make = Callable[..., WeightedReward]


@pytest.fixture
def reward() -> Iterator[Make]:
    rewards: list[WeightedReward] = []

    def build(**values: Any) -> WeightedReward:
        rewards.append(make_reward(Reward.model_validate(values), cores=1))
        return rewards[-1]

    yield build
    for made in rewards:
        made.close()


def judge(made: WeightedReward, completions: Sequence[str]) -> list[float | None]:
    count = len(completions)
    places = [f"rows.jsonl:{line}" for line in range(1, count + 1)]
    return made.score(["p"] * count, completions, ROWS[:count], places)


def test_weighted_sum_adds_scores_and_reports_each_part(reward: Make) -> None:
    parts = {
        "right": {"name": "exact_match"},
        "short": {**LENGTHS, "options": {"by": 1.0}, "weight": -0.5},
        "watched": {**LENGTHS, "weight": 0.0},
    }
    made = reward(parts=parts)
    judged = judge(made, ["a", "bb", "x"])
    assert judged == [1.0 - 0.5 * 2, -0.5 * 3, 1.0 - 0.5 * 2]
    expected = {
        "reward/right": (2.0, 3.0),
        "reward/short": (7.0, 3.0),
        "reward/watched": (4.0, 3.0),
    }
    assert made.metrics() == expected
    assert made.given[1] == {"right": 0.0, "short": 3.0, "watched": 2.0}


def test_single_reward_has_no_part_metrics(reward: Make) -> None:
    made = reward(name="exact_match")
    assert judge(made, ["a", "c", "x"]) == [1.0, 0.0, 1.0]
    assert made.metrics() == {}


def test_row_selects_the_reward_parts_that_score_it(reward: Make) -> None:
    parts = {
        "first": {"name": "exact_match", "where": {"source": "one"}},
        "second": {**LENGTHS, "where": {"source": ["two", "three"]}},
    }
    made = reward(parts=parts)
    judged = judge(made, ["a", "bbbb", "y"])
    assert judged == [1.0, 4.0, 0.0]
    assert made.metrics() == {
        "reward/first": (1.0, 2.0),
        "reward/second": (4.0, 1.0),
    }
    problems = made.check_rows([*ROWS, {"source": "four"}, {}])
    assert problems[:3] == ["", "", ""]
    assert problems[3].startswith("no part of the reward scores this row (source: 'four')")
    assert "(source: absent)" in problems[4]
    with pytest.raises(RewardError, match=r"rows\.jsonl:9: no part .* \(source: 'four'\)"):
        made.score(["p"], ["a"], [{"source": "four"}], ["rows.jsonl:9"])


@pytest.mark.parametrize(
    ("where", "row", "judged"),
    [
        ({}, {}, True),
        ({"a.b": 1}, {"a": {"b": 1}}, True),
        ({"a.b": 1}, {"a.b": 1}, True),
        ({"a.b": 1}, {"a": [1]}, False),
        ({"a": 1}, {"a": True}, False),
        ({"a": True}, {"a": 1}, False),
        ({"a": [False, "x"]}, {"a": "x"}, True),
        ({"a": 1, "b": 2}, {"a": 1, "b": 3}, False),
    ],
)
def test_fields_are_compared_as_json(
    where: dict[str, Any], row: dict[str, Any], judged: bool
) -> None:
    assert applies(RewardPart(name="exact_match", where=where), row) is judged


def test_pooled_part_contributes_scores_and_statistics(reward: Make) -> None:
    pool = {"processes": 1, "unjudged_score": -2.0}
    made = reward(parts={"a": {"name": FAILING, "pool": pool, "weight": 10.0}})
    judged = judge(made, ["xx", "raise"])
    assert judged == [20.0, -20.0]
    assert made.metrics() == {
        "reward_unjudged": (1.0, 2.0),
        "reward/a": (0.0, 2.0),
    }


def test_sum_of_rewards_has_no_score_if_a_weighted_part_has_none(reward: Make) -> None:
    failing = {"name": FAILING, "pool": {"processes": 1}}
    for weight, scores in ((0.5, [1.5, None]), (0.0, [1.0, 0.0])):
        made = reward(parts={"a": {**failing, "weight": weight}, "b": {"name": "exact_match"}})
        assert judge(made, ["a", "raise"]) == scores


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (
            {"parts": {"a": {**LENGTHS, "weight": 1e39}, "b": {"name": "exact_match"}}},
            r"for rows.jsonl:1 is 1e\+39 = 1e\+39 \* 1 \(a\) \+ 1 \* 0 \(b\); it must be",
        ),
        (
            {"parts": {name: {**LENGTHS, "weight": w} for name, w in (("a", 3e38), ("b", 3e38))}},
            r"is 6e\+38 = 3e\+38 \* 1 \(a\) \+ 3e\+38 \* 1 \(b\)",
        ),
        (
            {"name": FAILING, "pool": {"processes": 1, "unjudged_score": -1e300}},
            r"the reward for rows.jsonl:2 is -1e\+300 = 1 \* -1e\+300 \(tests.support",
        ),
    ],
)
def test_sum_outside_float32_is_an_error(reward: Make, values: dict[str, Any], why: str) -> None:
    """The sum would be infinite on the ranks, and every advantage of its group NaN."""
    with pytest.raises(RewardError, match=why):
        judge(reward(**values), ["x", "raise"])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "needs a name, or parts"),
        ({"name": "math", "parts": {"a": {"name": "math"}}}, "both parts and settings"),
        ({"name": "math", "pool": {}}, "pool is not allowed with 'math'"),
        ({"parts": {"a": {"name": "math", "pool": {}}}}, "pool is not allowed with 'math'"),
        ({"parts": {"a b": {"name": "math"}}}, "a part has a name of 1 to 64 letters"),
        ({"parts": {"low": {"name": "math"}}}, "reward/low is the low end of the confidence"),
        ({"parts": {"a": {"name": "math", "weight": float("inf")}}}, "finite"),
        ({"parts": {"a": {"name": "math", "where": {"x": None}}}}, "where"),
    ],
)
def test_contradictory_reward_settings_are_rejected(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Reward.model_validate(values)


def test_pool_limits_may_change_on_resume() -> None:
    """Otherwise a trial that ended because of a low limit could not continue."""

    def config(timeout_s: float, name: str = f"{MODULE}:asynchronous") -> Config:
        part = {"name": name, "pool": {"timeout_s": timeout_s}}
        return Config.model_validate(ppo_config(reward={"parts": {"a.b": part}}))

    assert differences(config(1.0), config(2.0)) == []
    assert len(differences(config(1.0), config(1.0, f"{MODULE}:returning"))) == 1


def test_changed_row_does_not_reach_other_parts_or_completions(
    reward: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The completions of a prompt share the row of the dataset."""
    kinds = {"own:takes": _takes, "own:reads": _answers_left}
    monkeypatch.setattr(REWARDS, "find", kinds.get)
    made = reward(parts={name[4:]: {"name": name} for name in kinds})
    row = {"answers": ["a", "b"]}
    assert made.score(["p"] * 2, ["a", "b"], [row] * 2, ["rows.jsonl:1"] * 2) == [4.0, 4.0]
    assert row == {"answers": ["a", "b"]}


def _takes(prompts: Any, completions: Any, rows: Sequence[dict[str, Any]]) -> list[int]:
    """Remove an answer of each row, and return the number of its answers before."""
    return [len([row["answers"].pop(), *row["answers"]]) for row in rows]


def _answers_left(prompts: Any, completions: Any, rows: Sequence[dict[str, Any]]) -> list[int]:
    return [len(row["answers"]) for row in rows]


def test_row_is_not_copied_for_rewards_of_slurmrl(
    reward: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of code tests may have megabytes, and each completion would get a copy."""
    given: list[Any] = []

    def keeps(prompts: Any, completions: Any, rows: Sequence[dict[str, Any]]) -> list[float]:
        given.extend(rows)
        return [1.0] * len(rows)

    monkeypatch.setattr(REWARDS, "find", lambda name: keeps)
    row = {"answers": ["a"]}
    reward(name="exact_match").score(["p"] * 2, ["a"] * 2, [row] * 2, ["rows.jsonl:1"] * 2)
    assert [each is row for each in given] == [True, True]
