"""Estimates from several completions of each prompt: pass@k, maj@n, and their confidence intervals.
Pure functions, torch-free."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Hashable, Sequence
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


def majority(votes: Sequence[Hashable | None], correct: Sequence[bool]) -> float:
    """The probability that the most frequent vote is correct, with ties broken at random; 0 if all
    votes are None, which do not count. A vote whose completions differ in ``correct`` counts as
    their mean. (Self-consistency, Wang et al. 2022, arXiv 2203.11171.)"""
    outcomes: dict[Hashable, list[bool]] = defaultdict(list)
    for vote, right in zip(votes, correct, strict=True):
        if vote is not None:
            outcomes[vote].append(right)
    most = max(map(len, outcomes.values()), default=0)
    first = [rights for rights in outcomes.values() if len(rights) == most]
    return sum(sum(rights) / most for rights in first) / len(first) if first else 0.0


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
