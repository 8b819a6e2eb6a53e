"""Text for people: times, ends of processes, error lines, tables, bars."""

from __future__ import annotations

import signal
import sys
import textwrap
from collections.abc import Sequence
from itertools import pairwise

UNITS = (("d", 86400), ("h", 3600), ("min", 60))
GAP = "  "
LEAST = 28
"""Least columns for wrapped text; with fewer left it continues on the next line, further left."""
BELOW = "    "
BARS = "▁▂▃▄▅▆▇█"


def age(seconds: float | None) -> str:
    """Return ``40 s``, ``2.5 min``, ``3 h``: two digits are enough for people."""
    if seconds is None:
        return ""
    for unit, size in UNITS:
        if seconds >= 2 * size:
            value = seconds / size
            shown = f"{value:.1f}".removesuffix(".0") if value < 9.95 else f"{value:.0f}"
            return f"{shown} {unit}"
    return f"{seconds:.0f} s"


def signal_name(number: int) -> str:
    """Return ``SIGKILL``, or ``signal 40`` for a signal without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def exit_words(code: int) -> str:
    """Return ``SIGKILL`` or ``exited with code 7``. ``code`` is negative for a signal."""
    return signal_name(-code) if code < 0 else f"exited with code {code}"


def first_line(text: object) -> str:
    """Return the first line of an error's text, which may come from a damaged file."""
    return plain(str(text or "").strip().partition("\n")[0])


def plain(text: str) -> str:
    """Return the string on one line, without control characters."""
    return "".join(c if c.isprintable() else " " for c in text).strip()


def width() -> int | None:
    """Return the columns of the terminal on standard output; None if that is no terminal."""
    if not sys.stdout.isatty():
        return None
    import shutil  # slow to import

    return shutil.get_terminal_size().columns


def hanging(head: str, text: str, width: int | None) -> list[str]:
    """Return the lines of ``head`` followed by ``text``.

    Text beyond ``width`` continues below the beginning of the text; None wraps nothing.
    """
    if width is None or len(head) + len(text) <= width or not text:
        return [f"{head}{text}".rstrip()]
    if width - len(head) < LEAST:
        return [*([head.rstrip()] if head.strip() else []), *_wrap(BELOW, text, width)]
    first, *more = _wrap(" " * len(head), text, width)
    return [head + first.lstrip(), *more]


def table(rows: Sequence[Sequence[str]], width: int | None = None) -> list[str]:
    """Return left-aligned columns; the last one is wrapped to ``width``."""
    return [line for lines in row_lines(rows, width) for line in lines]


def row_lines(rows: Sequence[Sequence[str]], width: int | None = None) -> list[list[str]]:
    """Return the lines of each row of a table."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    heads = [
        "".join(cell.ljust(w) + GAP for cell, w in zip(row[:-1], widths, strict=False))
        for row in rows
    ]
    return [hanging(head, row[-1], width) for head, row in zip(heads, rows, strict=True)]


def _wrap(indent: str, text: str, width: int) -> list[str]:
    wrapper = textwrap.TextWrapper(
        max(width, len(indent) + LEAST),
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return wrapper.wrap(text)


def sparkline(values: Sequence[float], width: int) -> str:
    """Return one bar per value. With more than ``width`` values, a bar is the mean of a range."""
    from statistics import fmean  # slow to import

    count = min(width, len(values))
    edges = [number * len(values) // count for number in range(count + 1)]
    means = [fmean(values[a:b]) for a, b in pairwise(edges)]
    least, span = min(means), max(means) - min(means)
    if not span:
        return BARS[len(BARS) // 2] * count
    return "".join(BARS[round((mean - least) / span * (len(BARS) - 1))] for mean in means)
