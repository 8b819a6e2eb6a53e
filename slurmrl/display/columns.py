"""Aligned text: cut to the width of a terminal, whole lines in a pipe."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence

GAP = "  "
LEAST = 28
"""Least columns for wrapped text; with fewer left it continues on the next line, further left."""
BELOW = "    "


def width() -> int | None:
    """Return the columns of the terminal on standard output; None if that is no terminal."""
    if not sys.stdout.isatty():
        return None
    import shutil  # slow to import

    return shutil.get_terminal_size().columns


def hanging(head: str, text: str, width: int | None) -> list[str]:
    """Return the lines of ``head`` followed by ``text``. Text beyond ``width`` continues below the
    beginning of the text; None wraps nothing."""
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
