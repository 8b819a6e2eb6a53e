"""Estimates from several completions of each prompt: pass@k, maj@k, and their confidence intervals.
Pure functions, torch-free."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from itertools import zip_longest
from typing import Final, NamedTuple

Z_95: Final = 1.959963984540054
"""The 97.5 % quantile of the normal distribution."""


class ConfidenceInterval(NamedTuple):
    low: float
    high: float


def pass_at_k(n: int, correct: int, k: int) -> float:
    """The probability that at least one of ``k`` completions, drawn without replacement from ``n``
    of which ``correct`` are correct, is correct: 1 - C(n - c, k) / C(n, k), an unbiased estimate
    for k independent completions (Chen et al. 2021, arXiv 2107.03374, eq. 1)."""
    if not 0 < k <= n or not 0 <= correct <= n:
        raise ValueError(f"pass@{k} of {correct} correct completions of {n}")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def majorities(
    votes: Sequence[Hashable | None], correct: Sequence[bool], sizes: Sequence[int]
) -> list[float]:
    """maj@k for each k of ``sizes``: the probability that the most frequent vote among ``k``
    completions, drawn without replacement, is correct, with ties broken at random. It is the mean
    over all subsets of k completions, so unbiased for k independent ones.

    None is no vote; a subset without votes is wrong. A vote whose completions differ in ``correct``
    counts as their mean. (Self-consistency, Wang et al. 2022, arXiv 2203.11171.)
    """
    n = len(votes)
    outcomes: dict[Hashable, list[bool]] = defaultdict(list)
    for vote, right in zip(votes, correct, strict=True):
        outcomes[vote].append(right)
    silent = len(outcomes.pop(None, []))
    right_of: dict[int, float] = defaultdict(float)
    for rights in outcomes.values():
        right_of[len(rights)] += sum(rights) / len(rights)
    counts = Counter(map(len, outcomes.values()))
    wins = {size: _wins(size, counts, silent, n) for size, right in right_of.items() if right}
    return [sum(right_of[size] * won[k] for size, won in wins.items()) for k in sizes]


def _wins(size: int, counts: Mapping[int, int], silent: int, n: int) -> list[float]:
    """The share of the subsets of each size 0..n in which one vote with ``size`` completions is the
    most frequent; with t other votes as frequent, a subset counts 1 / (t + 1). ``counts`` are the
    numbers of votes by their numbers of completions."""
    share = [0.0] * (n + 1)
    subsets = _binomials(n, n)
    others = [other for other, votes in counts.items() for _ in range(votes - (other == size))]
    for most in range(1, size + 1):
        tied = [_binomials(silent, silent)]  # by the number of ties: subsets of each size
        for other in others:
            fewer = _binomials(other, most - 1)
            equal = [0] * most + [math.comb(other, most)] if other >= most else []
            tied = [
                _added(
                    _product(tied[ties], fewer) if ties < len(tied) else [],
                    _product(tied[ties - 1], equal) if ties else [],
                )
                for ties in range(len(tied) + bool(equal))
            ]
        chosen = math.comb(size, most)
        for ties, ways in enumerate(tied):
            for k, number in enumerate(ways, most):
                share[k] += chosen * number / ((ties + 1) * subsets[k])
    return share


def _binomials(count: int, largest: int) -> list[int]:
    """C(count, v) for each v up to ``largest`` and ``count``."""
    return [math.comb(count, v) for v in range(min(count, largest) + 1)]


def _product(left: Sequence[int], right: Sequence[int]) -> list[int]:
    """The coefficients of a product of polynomials."""
    if not left or not right:
        return []
    made = [0] * (len(left) + len(right) - 1)
    for i, a in enumerate(left):
        for j, b in enumerate(right):
            made[i + j] += a * b
    return made


def _added(left: Sequence[int], right: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip_longest(left, right, fillvalue=0)]


def vote_of(completion: str, pattern: str | None) -> str | None:
    """The answer that a completion votes for: the last match of ``pattern`` (its group, if it has
    one), else the whole text, without surrounding white space; None without a match."""
    if pattern is None:
        return completion.strip()
    matches = list(re.finditer(pattern, completion))
    if not matches:
        return None
    found: str | None = matches[-1][1 if matches[-1].re.groups else 0]
    return None if found is None else found.strip()


def wilson(mean: float, count: int) -> ConfidenceInterval:
    """The 95 % score interval of a proportion (Wilson 1927) from ``count`` independent values. It
    is wider than needed for values between 0 and 1, whose variance is at most mean (1 - mean)."""
    if count < 1 or not 0.0 <= mean <= 1.0:
        raise ValueError(f"a mean of {mean} from {count} values")
    square = Z_95 * Z_95
    scale = 1.0 + square / count
    center = (mean + square / (2.0 * count)) / scale
    half = Z_95 / scale * math.sqrt(mean * (1.0 - mean) / count + square / (4.0 * count * count))
    # (rounding must not put the mean outside)
    return ConfidenceInterval(
        max(0.0, min(mean, center - half)), min(1.0, max(mean, center + half))
    )
