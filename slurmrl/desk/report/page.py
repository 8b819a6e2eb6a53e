"""Reports as one HTML file, and charts for a terminal.

The HTML file neither loads nor sends anything: its policy only allows the scripts and styles of
this package, by their digests, and no connections. The content of trials is JSON in a script
element that the browser does not execute. No string in the JSON can end the element, and the script
only inserts the strings into the page as text.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from slurmrl import __version__
from slurmrl.desk.report.collecting import differences
from slurmrl.desk.report.report_data import Curve, TrialReport
from slurmrl.display.terminal import plain
from slurmrl.fsio import atomic

HARMLESS = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}
"""JSON escapes of characters that have a meaning in HTML or JavaScript."""
COLORS = ("blue", "orange", "green", "magenta", "cyan", "red", "yellow", "gray")
MARKERS = ("braille", "x", "o", "*", "+", "#", "@", "%")
"""Markers of the trials in charts without colors."""


def write(path: Path, reports: Sequence[TrialReport]) -> None:
    """Replace the file. Raises EnvironmentFailure."""
    atomic.replace(path, render(reports, now=time.time()).encode(), durable=False)


def render(reports: Sequence[TrialReport], *, now: float) -> str:
    """Return the page. The page shows the time ``now``, in seconds since the epoch."""
    data = {
        "version": __version__,
        "written": now,
        "trials": reports,
        "differences": differences([report.settings for report in reports]),
    }
    scripts = [_asset("uplot.js"), _asset("page.js")]
    styles = [_asset("uplot.css"), _asset("page.css")]
    return Template(_asset("page.html")).substitute(
        policy="; ".join(
            (
                "default-src 'none'",
                f"script-src {_digests(scripts)}",
                f"style-src {_digests(styles)}",
                "base-uri 'none'",
                "form-action 'none'",
            )
        ),
        styles="\n".join(f"<style>{text}</style>" for text in styles),
        data=embedded(data),
        scripts="\n".join(f"<script>{text}</script>" for text in scripts),
    )


def embedded(value: Any) -> str:
    """Return JSON that is safe in a script element, for any strings and numbers."""
    encode = partial(json.dumps, default=vars, separators=(",", ":"))
    try:
        text = encode(value, allow_nan=False)
    except ValueError:  # JSON lacks NaN and infinities: write them as strings
        text = encode(json.loads(encode(value), parse_constant=str), allow_nan=False)
    return text.translate(HARMLESS)


def _digests(texts: Sequence[str]) -> str:
    return " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        for text in texts
    )


@cache
def _asset(name: str) -> str:
    return files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def chart(
    title: str, curves: Mapping[str, Curve], *, width: int, height: int, colored: bool
) -> str:
    """Return one chart of the curves, by trial; ``width`` and ``height`` are in characters."""
    import plotext  # The HTML report does not need plotext.

    plotext.clear_figure()
    plotext.theme("clear")
    plotext.limit_size(False, False)  # Do not limit the chart to the terminal.
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
            marker="braille" if colored else MARKERS[number % len(MARKERS)],
            color=COLORS[number % len(COLORS)] if colored else None,
        )
    values = [y for curve in curves.values() for y in curve.y if y is not None]
    low, high = min(values), max(values)
    if (size := max(high, -low)) and not 1e-5 <= size < 1e9:  # plotext would write all digits
        ticks = [low + (high - low) * share / 3 for share in range(4 if low < high else 1)]
        plotext.yticks(ticks, [f"{tick:.4g}" for tick in ticks])
    text: str = plotext.build() if colored else plotext.uncolorize(plotext.build())
    return text.rstrip("\n")


def whole_ticks(low: int, high: int, most: int = 6) -> list[int]:
    """Return at most ``most`` round numbers from ``low`` to ``high``, at equal distances."""
    distances = (digit * 10**power for power in range(19) for digit in (1, 2, 5))
    for distance in distances:
        first = -(-low // distance) * distance
        if first <= high and (high - first) // distance < most:
            return list(range(first, high + 1, distance))
    return [low]
