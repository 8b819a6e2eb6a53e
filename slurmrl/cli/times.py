"""Times on the command line and in its output."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

UNITS_S = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_CLOCK = re.compile(r"\d{1,2}:\d\d(:\d\d)?")


def since_option(command: F) -> F:
    """Add ``--since``: seconds since the epoch, or None."""
    option = click.option(
        "--since",
        callback=_since,
        metavar="SPAN|TIME",
        help="Print only the last 90s, 10min, 2h or 1d, or what was written since 14:30 today or "
        "since '2026-01-31 14:30'.",
    )
    return option(command)


def _since(context: click.Context, parameter: click.Parameter, text: str | None) -> float | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip())
    if match is not None and match[2] in UNITS_S:
        return time.time() - float(match[1]) * UNITS_S[match[2]]
    try:
        return _moment(text.strip()).timestamp()
    except (ValueError, OverflowError):
        raise click.BadParameter(
            f"{text!r} is neither a time span (90s, 10min, 2h, 1d) nor a time (14:30, "
            "2026-01-31, '2026-01-31 14:30')"
        ) from None


def _moment(text: str) -> datetime:
    """Return a time of today or of a date, in the reader's zone if it names none."""
    if _CLOCK.fullmatch(text):
        return datetime.fromisoformat(f"{datetime.fromtimestamp(time.time()):%Y-%m-%d} {text:0>5}")
    return datetime.fromisoformat(text)


def clock(seconds: float) -> str:
    """Return ``11-21 16:02:29.3``, the reader's local time."""
    try:
        return f"{datetime.fromtimestamp(seconds):%m-%d %H:%M:%S.%f}"[:-5]
    except (ValueError, OverflowError, OSError):
        return "(invalid time)".ljust(len("11-21 16:02:29.3"))
