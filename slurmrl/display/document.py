"""The blocks of a document, independent of the format in which it is shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

T = TypeVar("T")


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
    """Series on rows and columns: models on hosts and their GPUs. ``row``, ``column`` and
    ``series`` are the words for one of each."""

    title: str
    row: str
    column: str
    series: str
    rows: Sequence[GridRow]


@dataclass(frozen=True)
class NodeLine:
    """A line of a node; ``mark`` is whether the node reads or produces the item."""

    words: str
    mark: Literal["", "in", "out"] = ""


@dataclass(frozen=True)
class Node:
    """``level`` is the distance from the sources of the graph; ``series`` determines the colour."""

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
