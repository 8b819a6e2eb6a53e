"""Rendering of documents as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from slurmrl.display.columns import table
from slurmrl.display.document import (
    Block,
    Document,
    Flow,
    Grid,
    GridRow,
    Legend,
    Lines,
    Node,
    Table,
    elide,
)

MOST_ROWS: Final = 16
"""Rows of a grid that are shown."""
MARKS: Final = {"": "", "in": "<- ", "out": "-> "}


def render(document: Document) -> str:
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
    return "\n".join([head, *(f"  {MARKS[line.mark]}{line.words}" for line in node.lines)])


def _columns(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"  {line}" for line in table(rows))
