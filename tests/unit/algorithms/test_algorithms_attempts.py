"""Estimates from several completions of each prompt, against enumeration."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from slurmrl.algorithms.rule_reward import score_records
from slurmrl.algorithms.summaries import majorities, pass_at_k, vote_of, wilson
from slurmrl.config.schema import Dataset, Evaluation


def evaluation(**settings: Any) -> Evaluation:
    return Evaluation(dataset=Dataset(type="prompt", path="rows.jsonl"), **settings)


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_completion() -> None:
    for n in range(1, 8):
        for correct in range(n + 1):
            outcomes = [place < correct for place in range(n)]
            for k in range(1, n + 1):
                subsets = list(combinations(outcomes, k))
                share = sum(map(any, subsets)) / len(subsets)
                assert pass_at_k(n, correct, k) == pytest.approx(share, abs=1e-12)


def test_pass_at_k_is_exact_for_many_completions() -> None:
    assert pass_at_k(1000, 1, 1000) == 1.0
    assert pass_at_k(1000, 1, 500) == 0.5
    assert pass_at_k(2000, 0, 700) == 0.0
    with pytest.raises(ValueError, match="pass@3"):
        pass_at_k(2, 1, 3)


def test_majority_rate_is_the_mean_over_subsets_and_tie_breaks() -> None:
    """Compares with the enumeration of all subsets. Tied votes win equally often."""
    rng = random.Random(3)
    for _ in range(200):
        votes = [rng.choice(["4", "5", "6", None]) for _ in range(rng.randint(1, 7))]
        correct = [vote == "4" for vote in votes]
        sizes = range(1, len(votes) + 1)
        expected = []
        for k in sizes:
            subsets = list(combinations(votes, k))
            expected.append(sum(map(_first_is_right, subsets)) / len(subsets))
        assert majorities(votes, correct, sizes) == pytest.approx(expected)
    assert majorities(["a", "a", "b"], [True, False, False], [3]) == [0.5], "judged differently"


def _first_is_right(votes: tuple[str | None, ...]) -> float:
    counted = Counter(vote for vote in votes if vote is not None)
    winners = [vote for vote in counted if counted[vote] == max(counted.values())]
    return winners.count("4") / len(winners) if winners else 0.0


@pytest.mark.parametrize(
    "counts",
    [(16, 16, 16, 12), (1, 1, 1, 1, 8), (30, 5, 5, 5), (128, 100), (2, 61)],
    ids=str,
)
def test_majority_rate_of_many_completions_equals_the_sum_over_subsets(
    counts: tuple[int, ...],
) -> None:
    """Compares maj@k with exact sums over the numbers of each vote in a subset.

    The first vote is right in three of four completions or in all, and the second in all. Four
    completions have no vote.
    """
    n = sum(counts) + 4
    right = [Fraction(3, 4) if counts[0] % 4 == 0 else Fraction(1), Fraction(1), *[Fraction(0)] * 3]
    votes = [place for place, count in enumerate(counts) for _ in range(count)] + [None] * 4
    correct = [
        place < right[vote] * counts[vote]
        for vote, count in enumerate(counts)
        for place in range(count)
    ]
    for k in {2, 3, n // 2, n - 1, n}:
        expected = Fraction(0)
        for held in _held((*counts, 4), k):
            ways = math.prod(map(math.comb, (*counts, 4), held))
            most = max(held[:-1])
            winners = [vote for vote, number in enumerate(held[:-1]) if number == most > 0]
            won = sum((right[vote] for vote in winners), Fraction(0))
            expected += Fraction(ways, math.comb(n, k)) * won / (len(winners) or 1)
        found = majorities(votes, [*correct, *[False] * 4], [k])
        assert found == pytest.approx([float(expected)], abs=2e-12), k


def _held(counts: tuple[int, ...], k: int) -> Iterator[tuple[int, ...]]:
    """Yield the possible numbers of each vote in a subset of ``k`` completions."""
    if len(counts) == 1:
        if k <= counts[0]:
            yield (k,)
        return
    for number in range(min(counts[0], k) + 1):
        for rest in _held(counts[1:], k - number):
            yield (number, *rest)


def test_majority_rate_of_800_completions_takes_little_time() -> None:
    """An exact sum over votes, ties and subset sizes would take minutes."""
    votes = [size for size in range(1, 40) for _ in range(size)]
    first, last = majorities(votes, [vote == 39 for vote in votes], [1, len(votes)])
    assert (first, last) == (pytest.approx(39 / len(votes)), 1.0)


def test_majority_rate_of_more_completions_than_exist_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"for 2 completions"):
        majorities(["a", "b"], [True, False], [1, 3])


def test_majorities_of_many_completions_do_not_overflow() -> None:
    """The binomial coefficient C(1500, 750) exceeds the range of a float."""
    votes = ["4"] * 900 + ["5"] * 600
    first, middle, last = majorities(votes, [vote == "4" for vote in votes], [1, 750, 1500])
    assert first == pytest.approx(0.6)
    assert 0.999 < middle <= 1.0 == last


@pytest.mark.parametrize(
    ("completion", "pattern", "vote"),
    [
        (" 42\n", None, "42"),
        ("6 * 7\n#### 42 ", "#### (.*)", "42"),
        ("#### 41\n#### 42", "#### (.*)", "42"),
        ("so 42", r"\d+", "42"),
        ("no answer", "#### (.*)", None),
        ("x", "(y)?x", None),
    ],
)
def test_completion_votes_for_the_matched_answer(
    completion: str, pattern: str | None, vote: str
) -> None:
    assert vote_of(completion, pattern) == vote


def test_wilson_interval_solves_the_score_equation() -> None:
    """The bounds are the proportions for which the observed mean has a z-score of 1.96."""
    for mean, count in [(0.0, 7), (0.3, 10), (0.5, 1), (1.0, 40), (0.999, 512)]:
        low, high = wilson(mean, count)
        assert 0.0 <= low <= mean <= high <= 1.0
        for end in (end for end in (low, high) if 1e-12 < end < 1 - 1e-12):
            z = abs(mean - end) / math.sqrt(end * (1.0 - end) / count)
            assert z == pytest.approx(1.959963984540054, rel=1e-6)
    with pytest.raises(ValueError, match=r"mean 0\.5 of 0 values: .* at least 1 value"):
        wilson(0.5, 0)


def test_each_prompt_has_a_record_with_its_rates() -> None:
    settings = evaluation(n=3, pass_score=0.5)
    assert settings.attempts == (1, 2, 3)
    texts = ["4", "4", "4", "5", "7", "7"]
    rewards = [1.0, 0.5, 1.0, 1.0, 0.4, 0.0]
    first, second = score_records(["p@0", "a@b@0"], [3, 3], rewards, texts, settings).values()
    always = dict.fromkeys(settings.rates, 1.0)
    assert first == {"rewards": [1.0, 0.5, 1.0], "reward": 2.5 / 3, **always}
    passed = {"pass@1": 1 / 3, "pass@2": 2 / 3, "pass@3": 1.0}
    rates = passed | {"maj@2": 1 / 3, "maj@3": 0.0}
    own = {"rewards": [1.0, 0.4, 0.0], "reward": 1.4 / 3}
    assert second == own | {name: pytest.approx(rate) for name, rate in rates.items()}
    assert score_records([], [], [], [], settings) == {}
    voting = evaluation(n=3, pass_score=1.0, vote_pattern="#.")
    voted = score_records(["p@0"], [3], [1.0, 0.0, 0.0], ["#1 a", "b", "c"], voting)
    assert voted["p@0"]["maj@3"] == 1.0


def test_single_completion_has_no_pass_or_majority_rates() -> None:
    lines = score_records(["p@0"], [1], [0.5], ["a"], evaluation(pass_score=1.0))
    assert lines == {"p@0": {"rewards": [0.5], "reward": 0.5}}
    settings = evaluation(n=8, pass_score=1.0)
    assert settings.attempts == (1, 2, 4, 8)
    agreed = ("maj@2", "maj@4", "maj@8")
    assert settings.rates == ("pass@1", "pass@2", "pass@4", "pass@8", *agreed)
    assert evaluation(n=8).rates == (), "nothing says what is correct"


@pytest.mark.parametrize(("pattern", "reason"), [("(", "be a regular"), ("(a)(b)", "2 groups")])
def test_answer_pattern_without_group_is_rejected(pattern: str, reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        evaluation(vote_pattern=pattern)


def test_rate_metrics_are_known_before_the_run(tmp_path: Path) -> None:
    from slurmrl.errors import ConfigError
    from slurmrl.plan.settings import load_settings

    example = Path(__file__).parents[3] / "examples" / "ppo.yaml"
    several = ["evaluation.n=4", "stop_when=eval/maj@4/low >= 0.9"]
    keys = {"actor.path"}
    for overrides, expected in [(several, keys), (several[1:], keys | {"stop_when"})]:
        with pytest.raises(ConfigError) as caught:
            load_settings(example, overrides, root=tmp_path)
        assert {problem.key for problem in caught.value.problems} == expected
