"""What the results of an evaluation amount to: means over the items, with 95 % confidence
intervals. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from slurmrl.algorithms.reward.attempts import (
    Z_95,
    majorities,
    pass_at_k,
    vote_of,
    wilson,
)
from slurmrl.config.schema.rollout import subset_sizes
from slurmrl.graph.call import Estimate, Record, Summary


def of_completions(
    records: Iterable[Record], *, n: int, pass_score: float | None, pattern: str | None
) -> Summary:
    """``avg@n`` (the mean reward) and, with a ``pass_score``, ``pass@k`` and ``maj@k``, as means
    over the prompts."""
    sizes = subset_sizes(n) if pass_score is not None else ()
    scores = []
    for record in records:
        completions = record["completions"]
        rewards = [_number(each["reward"]) for each in completions]
        correct = [pass_score is not None and reward >= pass_score for reward in rewards]
        votes = [vote_of(each["text"], pattern) for each in completions]
        passed = {f"pass@{k}": pass_at_k(n, sum(correct), k) for k in sizes}
        agreed = zip(sizes[1:], majorities(votes, correct, sizes[1:]), strict=True)
        scores.append(
            {
                "id": record["id"],
                "rewards": rewards,
                f"avg@{n}": sum(rewards) / n,
                **passed,
                **{f"maj@{k}": value for k, value in agreed},
            }
        )
    rates = [f"{rate}@{k}" for rate, ks in (("pass", sizes), ("maj", sizes[1:])) for k in ks]
    estimates = {f"avg@{n}": mean(_column(scores, f"avg@{n}"))}
    return Summary(estimates | {name: rate(_column(scores, name)) for name in rates}, scores)


def of_preferences(records: Iterable[Record]) -> Summary:
    """``accuracy`` (the share of pairs whose chosen answer scores higher; a tie counts as wrong)
    and ``margin`` (chosen less rejected), as means over the prompts of the means over their
    pairs."""
    scores = []
    for record in records:
        margins = [
            _number(chosen) - _number(rejected)
            for chosen, rejected in zip(record["chosen"], record["rejected"], strict=True)
        ]
        right = sum(margin > 0 for margin in margins)
        scores.append(
            {
                **record,
                "accuracy": right / len(margins),
                "margin": sum(margins) / len(margins),
            }
        )
    estimates = {
        "accuracy": rate(_column(scores, "accuracy")),
        "margin": mean(_column(scores, "margin")),
    }
    return Summary(estimates, scores)


def of_likelihood(records: Iterable[Record]) -> Summary:
    """``loss``, the mean of -log p over all tokens of answers, and ``perplexity``, its
    exponential."""
    scores = [dict(record) for record in records]
    losses = [-logprob for logprob in _column(scores, "logprob")]
    loss = ratio(losses, _column(scores, "tokens"))
    return Summary({"loss": loss, "perplexity": Estimate(*map(_exp, loss))}, scores)


def mean(values: Sequence[float]) -> Estimate:
    """The mean of independent values, with the normal interval from their standard deviation; NaN
    bounds for a single value."""
    return ratio(values, [1.0] * len(values))


def ratio(values: Sequence[float], weights: Sequence[float]) -> Estimate:
    """The ratio of two sums over independent items, with the normal interval from the standard
    deviation of its linearisation ``value - ratio * weight`` (Cochran 1977, eq. 6.13)."""
    count, total = len(values), math.fsum(weights)
    center = math.fsum(values) / total
    if count < 2:
        return Estimate(center, math.nan, math.nan)
    squares = math.fsum(
        (value - center * weight) ** 2 for value, weight in zip(values, weights, strict=True)
    )
    half = Z_95 * math.sqrt(squares * count / (count - 1)) / total
    return Estimate(center, center - half, center + half)


def rate(values: Sequence[float]) -> Estimate:
    """The mean of independent values between 0 and 1, with Wilson's interval."""
    center = min(max(math.fsum(values) / len(values), 0.0), 1.0)
    return Estimate(center, *wilson(center, len(values)))


def _column(scores: Sequence[Record], name: str) -> list[float]:
    return [_number(score[name]) for score in scores]


def _number(value: float | None) -> float:
    """A value as it was before it became JSON, in which NaN and infinities are null."""
    return math.nan if value is None else float(value)


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
