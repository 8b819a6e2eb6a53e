"""Metrics as curves. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from slurmrl.desk.report.contents import Curve
from slurmrl.run.metrics import TIME

MOST_POINTS = 4000
"""Of a curve. A screen has fewer columns."""
DIGITS = 7
PLACES = ("step", TIME)
"""What says where a line stands; all others are metrics."""


def curves(lines: Iterable[Mapping[str, Any]]) -> dict[str, Curve]:
    """Return the curve of each metric, in the order in which they first appear."""
    found: dict[str, tuple[list[int], list[float | None]]] = {}
    for line in lines:
        for name, value in line.items():
            if name not in PLACES and (value is None or _is_number(value)):
                steps, values = found.setdefault(name, ([], []))
                steps.append(line["step"])
                values.append(None if value is None else float(f"{value:.{DIGITS}g}"))
    return {
        name: Curve(x=steps, y=values)
        for name, (steps, values) in found.items()
        if any(value is not None for value in values)
    }


def smoothed(values: Iterable[float | None], factor: float) -> list[float | None]:
    """Return the exponential moving averages; ``factor``, below 1, is the weight of the past.

    The first values have no bias towards zero.
    """
    mean = weight = 0.0
    found: list[float | None] = []
    for value in values:
        if value is not None:
            weight = factor * weight + (1 - factor)
            mean += (value - mean) * ((1 - factor) / weight)  # exact for constants
        found.append(None if value is None else mean)
    return found


def thinned(curve: Curve, most: int = MOST_POINTS) -> Curve:
    """Return a curve of at most ``most`` points.

    A longer one is cut into ranges of equal length, and each keeps its least and its greatest
    value: no peak is lost.
    """
    x, y = curve.x, curve.y
    if len(x) <= most:
        return curve
    ranges = most // 2
    kept: list[int] = []
    for number in range(ranges):
        places = range(number * len(x) // ranges, (number + 1) * len(x) // ranges)
        known = [(value, place) for place in places if (value := y[place]) is not None]
        kept += sorted({min(known)[1], max(known)[1]}) if known else [places[0]]
    return Curve(x=[x[place] for place in kept], y=[y[place] for place in kept])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
