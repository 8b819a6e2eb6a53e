"""The blocks of a document, and the document as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, TypeVar

from slurmrl.display.terminal import table

T = TypeVar("T")
MOST_ROWS: Final = 16
"""Rows of a grid that are shown."""
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
    """``cells[column]`` maps each series in the cell to its words."""

    label: str
    cells: Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class Grid:
    """Series on rows and columns: models on hosts and their GPUs.

    ``row``, ``column`` and ``series`` are the words for one of each.
    """

    title: str
    row: str
    column: str
    series: str
    rows: Sequence[GridRow]


@dataclass(frozen=True)
class NodeLine:
    """A line of a node; ``mark`` is whether the node reads or produces the item.

    ``source`` names the node that produces an item that is read. The text names it; a picture has
    arrows instead.
    """

    words: str
    mark: Literal["", "in", "out"] = ""
    source: str = ""


@dataclass(frozen=True)
class Node:
    """``level`` is the distance from the sources of the graph; ``series`` determines the color."""

    name: str
    level: int
    lines: Sequence[NodeLine]
    description: str = ""
    series: str | None = None


@dataclass(frozen=True)
class Flow:
    """A directed acyclic graph; each arrow goes from one node's name to another's."""

    nodes: Sequence[Node]
    arrows: Sequence[tuple[str, str]]


Block: TypeAlias = Table | Lines | Legend | Grid | Flow


@dataclass(frozen=True)
class Document:
    title: str
    blocks: Sequence[Block]
    subtitle: str = ""
    """Follows the title in text."""


def elide(rows: Sequence[T], most: int) -> list[T | None]:
    """At most ``most`` rows: the first ones and the last, with None for those between them."""
    if len(rows) <= most:
        return list(rows)
    return [*rows[: most - 1], None, rows[-1]]


def as_text(document: Document) -> str:
    """The title and the blocks, with an empty line between them."""
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
    """One row for each series of each row of the grid."""
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
