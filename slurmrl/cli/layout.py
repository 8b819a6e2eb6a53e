"""Aligned text: cut to the width of a terminal, whole lines in a pipe."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence

GAP = "  "
LEAST = 28
"""Columns that a text is wrapped to at least; with fewer left it goes on below, further left."""
BELOW = "    "


def width() -> int | None:
    """Columns of the terminal that standard output is; None where it is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def hanging(head: str, text: str, width: int | None) -> list[str]:
    """``head`` with ``text`` behind it. What does not fit into ``width`` goes on below the text's
    beginning; None cuts nothing up."""
    if width is None or len(head) + len(text) <= width or not text:
        return [f"{head}{text}".rstrip()]
    if width - len(head) < LEAST:
        return [*([head.rstrip()] if head.strip() else []), *_wrap(BELOW, text, width)]
    first, *more = _wrap(" " * len(head), text, width)
    return [head + first.lstrip(), *more]


def table(rows: Sequence[Sequence[str]], width: int | None = None) -> list[str]:
    """Left-aligned columns, the last of which may hang."""
    return [line for lines in row_lines(rows, width) for line in lines]


def row_lines(rows: Sequence[Sequence[str]], width: int | None = None) -> list[list[str]]:
    """The lines of each row of a table."""
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
