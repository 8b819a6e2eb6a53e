"""Two trials side by side. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slurmrl.desk.report.contents import Curve


@dataclass(frozen=True)
class Point:
    step: int
    value: float


@dataclass(frozen=True)
class Extent:
    """Values of a metric in one trial."""

    common: Point | None
    """At the last step of which both trials have a value; None without such a step."""
    last: Point
    least: Point
    greatest: Point

    @property
    def is_constant(self) -> bool:
        return self.least.value == self.greatest.value


@dataclass(frozen=True)
class Comparison:
    settings: Mapping[str, list[Any]]
    """The two values of each dotted key in which the trials differ, see `settings.differences`."""
    metrics: Mapping[str, tuple[Extent, Extent]]
    """Those that both trials have."""


def shared(one: Mapping[str, Curve], two: Mapping[str, Curve]) -> dict[str, tuple[Extent, Extent]]:
    """Return the extents of the metrics that both trials have, in the order of the first."""
    return {name: _pair(one[name], two[name]) for name in one if name in two}


def _pair(one: Curve, two: Curve) -> tuple[Extent, Extent]:
    steps = {point.step for point in _points(one)} & {point.step for point in _points(two)}
    common = max(steps, default=None)
    return extent(one, common), extent(two, common)


def _points(curve: Curve) -> list[Point]:
    return [Point(x, y) for x, y in zip(curve.x, curve.y, strict=True) if y is not None]


def extent(curve: Curve, common: int | None) -> Extent:
    """Return the extent of a curve with at least one value.

    ``common``: the last step of which both trials have one. Among equal values the first is the
    least or the greatest.
    """
    points = _points(curve)
    return Extent(
        common=next((point for point in reversed(points) if point.step == common), None),
        last=points[-1],
        least=min(points, key=lambda point: point.value),
        greatest=max(points, key=lambda point: point.value),
    )
