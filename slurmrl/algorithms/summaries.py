"""Means and estimates from the results of an evaluation, with 95 % confidence intervals.

Means are over the items. Estimates such as pass@k and maj@k need several completions of each
prompt. Torch-free.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from functools import cache
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slurmrl.config.schema.rollout import subset_sizes
from slurmrl.errors import UsageError
from slurmrl.plan.dataflow import Estimate, Measure, Record, Summary

ROUNDING: Final = 1e-9
"""Rounding error by which a rate may be below 0 or above 1."""
Z_95: Final = 1.959963984540054
"""The 97.5 % quantile of the normal distribution."""


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return the probability that at least one of ``k`` completions is correct.

    The k completions are sampled without replacement from ``n``, of which c = ``correct`` are
    correct. The probability is 1 - C(n - c, k) / C(n, k), an unbiased estimate for k independent
    completions (Chen et al. 2021, arXiv 2107.03374, eq. 1).
    """
    if not 0 < k <= n or not 0 <= correct <= n:
        raise ValueError(f"pass@{k} is not defined for {correct} correct completions of {n}")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def majorities(
    votes: Sequence[Hashable | None], correct: Sequence[bool], sizes: Sequence[int]
) -> list[float]:
    """Return maj@k for each k of ``sizes``, rounded to the 12 decimal places that are accurate.

    maj@k is the probability that the most frequent vote among k completions, sampled without
    replacement, is correct (self-consistency, Wang et al. 2022, arXiv 2203.11171). Ties are broken
    at random. The mean over all subsets is an unbiased estimate for k independent completions.

    The vote None does not count, and a subset without votes is wrong. If only some completions of a
    vote are ``correct``, the mean of ``correct`` counts.
    """
    n = len(votes)
    if not all(0 < k <= n for k in sizes):
        raise ValueError(f"maj@k for k of {list(sizes)} is not defined for {n} completions")
    outcomes: dict[Hashable, list[bool]] = defaultdict(list)
    for vote, right in zip(votes, correct, strict=True):
        outcomes[vote].append(right)
    silent = len(outcomes.pop(None, []))
    shares = {vote: sum(rights) / len(rights) for vote, rights in outcomes.items()}
    if set(shares.values()) <= {1.0}:  # Every vote is correct, so any vote may win.
        return [pass_at_k(n, n - silent, k) for k in sizes]
    if not any(shares.values()):
        return [0.0] * len(sizes)
    alike: dict[int, list[float]] = defaultdict(list)
    for vote, rights in outcomes.items():
        alike[len(rights)].append(shares[vote])
    groups = [_AlikeVotes(size, len(each), sum(each)) for size, each in alike.items()]
    return [min(max(round(won, 12), 0.0), 1.0) for won in _majorities(groups, silent, sizes)]


class _AlikeVotes(NamedTuple):
    """Group of votes with equal numbers of completions."""

    size: int
    """Number of completions of each vote."""
    number: int
    """Number of votes."""
    right: float
    """Sum, over the votes, of the share of correct completions."""


def _majorities(votes: Sequence[_AlikeVotes], silent: int, sizes: Sequence[int]) -> Sequence[float]:
    """Return maj@k for each k of ``sizes``; ``silent`` completions do not vote.

    Sample each completion with probability k / n, independently: given that k are sampled, all
    subsets of k are equally likely. Each vote gets a uniform random number u, which breaks ties. A
    vote v then wins with m completions with the probability

        int_0^1 P(v has m) prod_{others w} [P(w has < m) + u P(w has m)] du,

    a polynomial in u that Gauss-Legendre quadrature integrates exactly. All probabilities are
    generating functions in z of the number of sampled completions. The functions are multiplied as
    their values at roots of unity, and a Fourier transform yields the coefficient of z^k.

    With fewer than n + 1 roots, the result includes cases with other numbers of sampled
    completions. The other numbers differ from k by at least the number of roots, which has a
    probability below 1e-17 (Hoeffding 1963).
    """
    n = silent + sum(each.size * each.number for each in votes)
    k = np.array(sizes)
    share = (k / n)[:, None, None]
    points = min(n, math.ceil(math.sqrt(20 * n))) + 1
    z = np.exp(-2j * math.pi / points * np.arange(points // 2 + 1))
    one = 1.0 - share + share * z  # axes: k, u, z
    counts = _binomials([each.size for each in votes], share)
    fewer = dict.fromkeys((each.size for each in votes), np.zeros_like(one))
    shares = np.zeros_like(one[:, 0])
    last = max((each.size for each in votes if each.right), default=0)
    for most in range(1, last + 1):
        nodes, weights = _quadrature(sum(each.number for each in votes if each.size >= most))
        small = silent + sum(each.size * each.number for each in votes if each.size < most)
        whole, won = one**small, np.zeros_like(one)
        for size, number, right in (each for each in votes if each.size >= most):
            fewer[size] = fewer[size] + counts[size][most - 1] * z ** (most - 1)
            equal = counts[size][most] * z**most
            loses = fewer[size] + nodes[:, None] * equal
            others = loses ** (number - 1)
            won = (won * loses + right * whole * equal) * others
            whole = whole * loses * others
        shares += np.einsum("kuz,u->kz", won, weights)
    places = k[:, None] % points
    chosen = np.take_along_axis(np.fft.irfft(shares, points), places, 1)
    possible = np.take_along_axis(np.fft.irfft(one[:, 0] ** n, points), places, 1)
    found: list[float] = (chosen / possible)[:, 0].tolist()
    return found


def _binomials(
    sizes: Collection[int], probability: NDArray[np.float64]
) -> dict[int, NDArray[np.float64]]:
    """Return the binomial distribution for each size: numbers of successes are on the first axis.

    Pascal's rule sums only positive terms, so no accuracy is lost.
    """
    row, rows = np.ones((1, *probability.shape)), {}
    edge = np.zeros_like(row)
    for size in range(1, max(sizes) + 1):
        failed, succeeded = row * (1.0 - probability), row * probability
        row = np.concatenate((failed, edge)) + np.concatenate((edge, succeeded))
        if size in sizes:
            rows[size] = row
    return rows


@cache
def _quadrature(points: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return nodes and weights that integrate polynomials of degree ``points - 1`` on [0, 1]."""
    nodes, weights = np.polynomial.legendre.leggauss(points // 2 + 1)
    return (nodes + 1.0) / 2.0, weights / 2.0


def attempt_rates(
    correct: Sequence[bool], votes: Sequence[str | None], sizes: Sequence[int]
) -> dict[str, float]:
    """Return a prompt's pass@k for each k of ``sizes``, and maj@k for all but the first size."""
    passed = {f"pass@{k}": pass_at_k(len(correct), sum(correct), k) for k in sizes}
    agreed = zip(sizes[1:], majorities(votes, correct, sizes[1:]), strict=True)
    return passed | {f"maj@{k}": share for k, share in agreed}


def vote_of(completion: str, pattern: str | None) -> str | None:
    """Return the answer that a completion votes for, without surrounding white space.

    The answer is the last match of ``pattern`` (its group, if it has one), or None without a match.
    Without a pattern, the answer is the whole completion.
    """
    if pattern is None:
        return completion.strip()
    matches = list(re.finditer(pattern, completion))
    if not matches:
        return None
    found: str | None = matches[-1][1 if matches[-1].re.groups else 0]
    return None if found is None else found.strip()


def wilson(mean: float, count: int) -> tuple[float, float]:
    """Return the 95 % score interval of a proportion (Wilson 1927) of ``count`` independent values.

    For values between 0 and 1, whose variance is at most mean (1 - mean), the interval is
    conservative.
    """
    if count < 1 or not 0.0 <= mean <= 1.0:
        rule = "it needs at least 1 value and a mean from 0 to 1"
        raise ValueError(f"no interval for mean {mean} of {count} values: {rule}")
    square = Z_95 * Z_95
    scale = 1.0 + square / count
    center = (mean + square / (2.0 * count)) / scale
    half = Z_95 / scale * math.sqrt(mean * (1.0 - mean) / count + square / (4.0 * count * count))
    # Rounding must not move the mean out of the interval.
    return max(0.0, min(mean, center - half)), min(1.0, max(mean, center + half))


def of_completions(
    records: Iterable[Record], *, n: int, pass_score: float | None, pattern: str | None
) -> Summary:
    """Summarize ``avg@n`` (the mean reward) and, with a ``pass_score``, ``pass@k`` and ``maj@k``.

    The estimates are means over the prompts. The mean reward leaves out completions without a
    score, and their prompts have no rates.
    """
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
    """Summarize the ``accuracy`` and the ``margin`` of preference pairs.

    ``accuracy`` is the share of pairs whose chosen answer scores higher; a tie counts as wrong.
    ``margin`` is the chosen score minus the rejected score. Both metrics are averaged over the
    pairs of a prompt, and then over the prompts.
    """
    scores = []
    for record in records:
        margins = [
            _number(chosen) - _number(rejected)
            for chosen, rejected in zip(record["chosen"], record["rejected"], strict=True)
        ]
        right = sum(margin > 0 for margin in margins)
        scores.append(
            {**record, "accuracy": right / len(margins), "margin": sum(margins) / len(margins)}
        )
    return summarize(scores, {"accuracy": Measure.RATE, "margin": Measure.MEAN})


def of_likelihood(records: Iterable[Record]) -> Summary:
    """Summarize ``loss`` and ``perplexity`` over all tokens of answers."""
    scores = [dict(record) for record in records]
    return summarize(scores, {"loss": Measure.LOSS, "perplexity": Measure.PERPLEXITY})


def summarize(scores: Sequence[Record], measures: Mapping[str, Measure]) -> Summary:
    """Return a mapping from names to estimates over all items; omit measures without a score.

    Raises UsageError if only some items lack a score, a score is not a number, or a rate is not
    between 0 and 1. Items may lack the score of a `PART_MEAN`. Items with an unscored completion
    may lack all scores.
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
                        "must be between 0 and 1; use Measure.MEAN for other numbers"
                    )
            return rate(values)
    losses = [-logprob for logprob in values]
    loss = ratio(losses, _column(scores, "tokens"))
    return loss if measure is Measure.LOSS else Estimate(*map(_exp, loss))


def _rewards(score: Record) -> list[float | None]:
    """Return the rewards of an item's completions, with None for completions without a score."""
    rewards = score.get("rewards", ())
    return [None if reward is None or math.isnan(reward) else reward for reward in rewards]


def mean(values: Sequence[float]) -> Estimate:
    """Return the mean of independent values, with the normal interval from their deviation.

    The bounds of the interval are NaN for a single value.
    """
    return ratio(values, [1.0] * len(values))


def ratio(values: Sequence[float], weights: Sequence[float]) -> Estimate:
    """Return the ratio of two sums over independent items, with its normal interval.

    The interval follows from the standard deviation of the linearization ``value - ratio * weight``
    (Cochran 1977, eq. 6.13). The result is NaN if all weights are zero or a sum overflows.
    """
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
    """Return the mean of values in [0, 1], with Wilson's interval; NaN if any value is NaN."""
    if any(map(math.isnan, values)):
        return Estimate(math.nan, math.nan, math.nan)
    center = min(max(math.fsum(values) / len(values), 0.0), 1.0)
    return Estimate(center, *wilson(center, len(values)))


def _column(scores: Sequence[Record], name: str) -> list[float]:
    """Return the items' scores of this name. Raises UsageError unless all are numbers."""
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
    """Return a JSON value as a number. Null stands for NaN and infinities, and becomes NaN."""
    return math.nan if value is None else float(value)


def _sum(values: Iterable[float]) -> float:
    """Return the sum; NaN if it overflows."""
    try:
        return math.fsum(values)
    except OverflowError:
        return math.nan


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
