"""What the results of an evaluation amount to: means over the items, with 95 % confidence
intervals. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from slurmrl.algorithms.reward.attempts import Z_95, attempt_rates, vote_of, wilson
from slurmrl.config.schema.rollout import subset_sizes
from slurmrl.errors import UsageError
from slurmrl.plan.graph.call import Estimate, Measure, Record, Summary

ROUNDING: Final = 1e-9
"""How far beyond 0 and 1 a rate may be."""


def of_completions(
    records: Iterable[Record],
    *,
    n: int,
    pass_score: float | None,
    pattern: str | None,
) -> Summary:
    """``avg@n`` (the mean reward) and, with a ``pass_score``, ``pass@k`` and ``maj@k``, as means
    over the prompts. Completions without a score are not in the mean, and their prompts have no
    rates."""
    sizes = subset_sizes(n) if pass_score is not None else ()
    scores = []
    for record in records:
        completions = record["completions"]
        rewards = [_number(each["reward"]) for each in completions]
        scored = [reward for reward in rewards if not math.isnan(reward)]
        own = {"id": record["id"], "rewards": rewards}
        if scored:
            own[f"avg@{n}"] = sum(scored) / len(scored)
        if len(scored) == n:
            correct = [pass_score is not None and reward >= pass_score for reward in rewards]
            votes = [vote_of(each["text"], pattern) for each in completions]
            own |= attempt_rates(correct, votes, sizes)
        scores.append(own)
    rates = attempt_rates([True] * n, [None] * n, sizes)
    return summarize(scores, {f"avg@{n}": Measure.REWARD, **dict.fromkeys(rates, Measure.RATE)})


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
    return summarize(scores, {"accuracy": Measure.RATE, "margin": Measure.MEAN})


def of_likelihood(records: Iterable[Record]) -> Summary:
    """``loss`` and ``perplexity`` over all tokens of answers."""
    scores = [dict(record) for record in records]
    return summarize(scores, {"loss": Measure.LOSS, "perplexity": Measure.PERPLEXITY})


def summarize(scores: Sequence[Record], measures: Mapping[str, Measure]) -> Summary:
    """The estimates of all items together, by name. A measure whose score no item has is left out.

    Raises UsageError for scores that some items lack (except for means of a part, and items with a
    completion without a score), that are not numbers, or rates that are not between 0 and 1.
    """
    estimates = {
        name: _estimate(scores, name, measure)
        for name, measure in measures.items()
        if any(measure.score(name) in score for score in scores)
    }
    return Summary(estimates, scores)


def _estimate(scores: Sequence[Record], name: str, measure: Measure) -> Estimate:
    if measure is Measure.PART_MEAN:
        return mean(_column([score for score in scores if name in score], name))
    scores = [score for score in scores if name in score or None not in _rewards(score)]
    values = _column(scores, measure.score(name))
    if measure is Measure.REWARD:
        given = {reward for score in scores for reward in _rewards(score)} - {None}
        measure = Measure.RATE if given <= {0.0, 1.0} else Measure.MEAN
    match measure:
        case Measure.MEAN:
            return mean(values)
        case Measure.RATE:
            for score, value in zip(scores, values, strict=True):
                if not -ROUNDING <= value <= 1.0 + ROUNDING and not math.isnan(value):
                    raise UsageError(
                        f"the score '{name}' of item {score.get('id')!r} is {value:g}: a rate "
                        "must be between 0 and 1; measure other numbers by Measure.MEAN"
                    )
            return rate(values)
    losses = [-logprob for logprob in values]
    loss = ratio(losses, _column(scores, "tokens"))
    return loss if measure is Measure.LOSS else Estimate(*map(_exp, loss))


def _rewards(score: Record) -> list[float | None]:
    """The rewards of an item's completions; None for those without a score."""
    rewards = score.get("rewards", ())
    return [None if reward is None or math.isnan(reward) else reward for reward in rewards]


def mean(values: Sequence[float]) -> Estimate:
    """The mean of independent values, with the normal interval from their standard deviation; NaN
    bounds for a single value."""
    return ratio(values, [1.0] * len(values))


def ratio(values: Sequence[float], weights: Sequence[float]) -> Estimate:
    """The ratio of two sums over independent items, with the normal interval from the standard
    deviation of its linearisation ``value - ratio * weight`` (Cochran 1977, eq. 6.13). NaN if the
    weights are all zero, or where a sum overflows."""
    count, total = len(values), _sum(weights)
    center = _sum(values) / total if total else math.nan
    if count < 2 or not total:
        return Estimate(center, math.nan, math.nan)
    squares = _sum(
        (value - center * weight) ** 2 for value, weight in zip(values, weights, strict=True)
    )
    half = Z_95 * math.sqrt(squares * count / (count - 1)) / total
    return Estimate(center, center - half, center + half)


def rate(values: Sequence[float]) -> Estimate:
    """The mean of independent values between 0 and 1, with Wilson's interval; NaN if a value is."""
    if any(map(math.isnan, values)):
        return Estimate(math.nan, math.nan, math.nan)
    center = min(max(math.fsum(values) / len(values), 0.0), 1.0)
    return Estimate(center, *wilson(center, len(values)))


def _column(scores: Sequence[Record], name: str) -> list[float]:
    """Raises UsageError for scores that are missing or not numbers."""
    for score in scores:
        value = score.get(name, "")
        if value is not None and not isinstance(value, int | float):
            what = f"has {value!r}" if name in score else "has none"
            raise UsageError(
                f"item {score.get('id')!r} {what} as its score '{name}': each item of an "
                "evaluation must have a number there"
            )
    return [_number(score[name]) for score in scores]


def _number(value: float | None) -> float:
    """A value as it was before it became JSON, in which NaN and infinities are null."""
    return math.nan if value is None else float(value)


def _sum(values: Iterable[float]) -> float:
    """NaN where it overflows."""
    try:
        return math.fsum(values)
    except OverflowError:
        return math.nan


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
