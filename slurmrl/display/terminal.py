"""Text for people: times, ends of processes, error lines, tables, bars, documents of blocks."""

from __future__ import annotations

import signal
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal, TypeAlias, TypeVar

UNITS = (("d", 86400), ("h", 3600), ("min", 60))
GAP = "  "
LEAST = 28
"""Minimum width of wrapped text in columns. With less space, text starts on the next line."""
BELOW = "    "
BARS = "▁▂▃▄▅▆▇█"


def age(seconds: float | None) -> str:
    """Return a time with two digits, such as ``40 s``, ``2.5 min`` or ``3 h``; empty for None."""
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
    """Return the columns of the terminal; None if standard output is no terminal."""
    if not sys.stdout.isatty():
        return None
    import shutil  # the import is slow

    return shutil.get_terminal_size().columns


def hanging(head: str, text: str, width: int | None) -> list[str]:
    """Return the lines of ``head`` followed by ``text``.

    ``width`` is in columns; a longer text continues below its beginning. None turns wrapping off.
    """
    if width is None or len(head) + len(text) <= width or not text:
        return [f"{head}{text}".rstrip()]
    if width - len(head) < LEAST:
        return [*([head.rstrip()] if head.strip() else []), *_wrap(BELOW, text, width)]
    first, *more = _wrap(" " * len(head), text, width)
    return [head + first.lstrip(), *more]


def table(rows: Sequence[Sequence[str]], width: int | None = None) -> list[str]:
    """Return the lines of left-aligned columns; wrap the last column to ``width`` columns."""
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
    """Return one bar per value. With more than ``width`` values, a bar shows a mean of several."""
    from statistics import fmean  # the import is slow

    count = min(width, len(values))
    edges = [number * len(values) // count for number in range(count + 1)]
    means = [fmean(values[a:b]) for a, b in pairwise(edges)]
    least, span = min(means), max(means) - min(means)
    if not span:
        return BARS[len(BARS) // 2] * count
    return "".join(BARS[round((mean - least) / span * (len(BARS) - 1))] for mean in means)


T = TypeVar("T")
MOST_ROWS: Final = 16
"""Maximum number of rows of a grid in text."""
MARKS: Final = {"": "", "in": "<- ", "out": "-> "}


@dataclass(frozen=True)
class Table:
    """Rows of cells under headings, between an optional title and an optional note."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    note: str = ""


@dataclass(frozen=True)
class Lines:
    """A title and lines below it."""

    title: str
    lines: Sequence[str] = ()


@dataclass(frozen=True)
class Legend:
    """The series of a document (the models), each with its description."""

    series: Mapping[str, str]


@dataclass(frozen=True)
class GridRow:
    """A row of a grid; ``cells[column]`` maps the name of each series to its words."""

    label: str
    cells: Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class Grid:
    """Series on rows and columns: models on hosts and their GPUs.

    ``row``, ``column`` and ``series`` are singular nouns, such as ``host``, ``GPU`` and ``model``.
    """

    title: str
    row: str
    column: str
    series: str
    rows: Sequence[GridRow]


@dataclass(frozen=True)
class NodeLine:
    """A line of a node; ``mark`` says whether the node reads (``in``) or produces (``out``) it.

    ``source`` names the node that produces an item to read. Text shows the name of the node; a
    picture has arrows instead.
    """

    words: str
    mark: Literal["", "in", "out"] = ""
    source: str = ""


@dataclass(frozen=True)
class Node:
    """A node of a graph.

    ``level`` is its distance from the sources of the graph; ``series`` determines the color.
    """

    name: str
    level: int
    lines: Sequence[NodeLine]
    description: str = ""
    series: str | None = None


@dataclass(frozen=True)
class Flow:
    """A directed acyclic graph; each arrow is a pair of names of nodes."""

    nodes: Sequence[Node]
    arrows: Sequence[tuple[str, str]]


Block: TypeAlias = Table | Lines | Legend | Grid | Flow


@dataclass(frozen=True)
class Document:
    title: str
    blocks: Sequence[Block]
    subtitle: str = ""
    """Words that follow the title in text."""


def elide(rows: Sequence[T], most: int) -> list[T | None]:
    """Return at most ``most`` rows: the first rows, None for omitted rows, and the last row."""
    if len(rows) <= most:
        return list(rows)
    return [*rows[: most - 1], None, rows[-1]]


def as_text(document: Document) -> str:
    """Return the title and the blocks as text, with an empty line between them."""
    head = f"{document.title}: {document.subtitle}" if document.subtitle else document.title
    return "\n\n".join(part for part in (head, *map(_block, document.blocks)) if part)


def _block(block: Block) -> str:
    match block:
        case Table():
            parts = (block.title, _columns([block.headings, *block.rows]), block.note)
            return "\n".join(part for part in parts if part)
        case Lines():
            return "\n".join([block.title, *(f"  {line}" for line in block.lines)])
        case Legend():
            return _columns(list(block.series.items()))
        case Grid():
            return f"{block.title}\n{_columns(list(_grid_rows(block)))}"
        case Flow():
            return "\n\n".join(_node(node) for node in block.nodes)


def _grid_rows(grid: Grid) -> Iterator[Sequence[str]]:
    """Yield the headings, then a table row for each series of each row of the grid."""
    columns = max((len(row.cells) for row in grid.rows), default=0)
    numbered = (f"{grid.column} {index}" for index in range(columns))
    yield grid.row.upper(), grid.series.upper(), *numbered
    for row in elide(grid.rows, MOST_ROWS):
        if row is None:
            yield ["…"] * (columns + 2)
        else:
            yield from _series_rows(row)


def _series_rows(row: GridRow) -> Iterator[Sequence[str]]:
    names = list(dict.fromkeys(name for cell in row.cells for name in cell)) or ["-"]
    for index, name in enumerate(names):
        label = row.label if index == 0 else ""
        yield label, name, *(cell.get(name, "-") for cell in row.cells)


def _node(node: Node) -> str:
    head = f"{node.name}: {node.description}" if node.description else node.name
    return "\n".join([head, *(f"  {_node_line(line)}" for line in node.lines)])


def _node_line(line: NodeLine) -> str:
    source = f" ({line.source})" if line.source else ""
    return f"{MARKS[line.mark]}{line.words}{source}"


def _columns(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"  {line}" for line in table(rows))
