"""Charts for a terminal, by plotext."""

from __future__ import annotations

from collections.abc import Mapping

import plotext

from slurmrl.desk.report.contents import Curve
from slurmrl.display.terminal import plain

COLOURS = ("blue", "orange", "green", "magenta", "cyan", "red", "yellow", "gray")
MARKERS = ("braille", "x", "o", "*", "+", "#", "@", "%")
"""Of trials, where colours do not tell them apart."""


def chart(
    title: str, curves: Mapping[str, Curve], *, width: int, height: int, coloured: bool
) -> str:
    """Return the curves, by the name of their trial, in one chart of so many characters."""
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.limit_size(False, False)  # to the terminal, as plotext sees it
    plotext.plotsize(width, height)
    plotext.title(plain(title))
    steps = [x for curve in curves.values() for x in curve.x]
    plotext.xticks(whole_ticks(min(steps), max(steps)))
    for number, (name, curve) in enumerate(curves.items()):
        points = [(x, y) for x, y in zip(curve.x, curve.y, strict=True) if y is not None]
        plotext.plot(
            [x for x, _ in points],
            [y for _, y in points],
            label=name if len(curves) > 1 else None,
            marker="braille" if coloured else MARKERS[number % len(MARKERS)],
            color=COLOURS[number % len(COLOURS)] if coloured else None,
        )
    text: str = plotext.build() if coloured else plotext.uncolorize(plotext.build())
    return text.rstrip("\n")


def whole_ticks(low: int, high: int, most: int = 6) -> list[int]:
    """Return at most ``most`` round steps from ``low`` to ``high``, at equal distances."""
    distances = (digit * 10**power for power in range(19) for digit in (1, 2, 5))
    for distance in distances:
        first = -(-low // distance) * distance
        if first <= high and (high - first) // distance < most:
            return list(range(first, high + 1, distance))
    return [low]
