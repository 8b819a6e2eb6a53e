"""Two trials side by side. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slurmrl.report.contents import Curve


@dataclass(frozen=True)
class Point:
    step: int
    value: float


@dataclass(frozen=True)
class Extent:
    """What became of a metric."""

    last: Point
    least: Point
    greatest: Point


@dataclass(frozen=True)
class Comparison:
    settings: Mapping[str, list[Any]]
    """The two values of each dotted key in which the trials differ, see `settings.differences`."""
    metrics: Mapping[str, tuple[Extent, Extent]]
    """Those that both trials have."""


def shared(one: Mapping[str, Curve], two: Mapping[str, Curve]) -> dict[str, tuple[Extent, Extent]]:
    """Return the extents of the metrics that both have, in the order of the first."""
    return {name: (extent(one[name]), extent(two[name])) for name in one if name in two}


def extent(curve: Curve) -> Extent:
    """``curve`` has at least one value. Of equal ones the first is the least or the greatest."""
    points = [Point(x, y) for x, y in zip(curve.x, curve.y, strict=True) if y is not None]
    return Extent(
        last=points[-1],
        least=min(points, key=lambda point: point.value),
        greatest=max(points, key=lambda point: point.value),
    )
