"""A curve on one line of text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """Return one bar for each value, or for each of ``width`` ranges of more values their mean."""
    count = min(width, len(values))
    edges = [number * len(values) // count for number in range(count + 1)]
    means = [fmean(values[a:b]) for a, b in pairwise(edges)]
    least, span = min(means), max(means) - min(means)
    if not span:
        return BARS[len(BARS) // 2] * count
    return "".join(BARS[round((mean - least) / span * (len(BARS) - 1))] for mean in means)
