"""Rendering of documents (legends, grids and graphs) as SVG for light and dark backgrounds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import cycle
from typing import Final, NamedTuple
from xml.sax.saxutils import escape

from slurmrl.display.document import Document, Flow, Grid, Legend, Node, elide

COLOURS: Final = ("#4477aa", "#ee6677", "#228833", "#aa8800", "#66ccee", "#aa3377")
"""For series, in order of appearance (Tol's bright palette)."""
NO_SERIES: Final = "#8c959f"
MOST_ROWS: Final = 32
"""Rows of a grid that are drawn."""
MARKS: Final = {"": "", "in": "← ", "out": "→ "}
LETTER: Final = 7.4
LINE: Final = 20
MARGIN: Final = 16
LABEL_WIDTH: Final = 84
"""Room for the labels left of a grid."""
GAP: Final = 8
"""Between the cells of a grid."""
NODE_GAPS: Final = (80, 26)
"""Between the nodes of a graph: beside and below each other."""
_STYLE: Final = """\
text { font: 12px ui-monospace, monospace; fill: #1b1f24; }
.head { font-weight: bold; }
.soft { fill: #57606a; }
.line { stroke: #8c959f; fill: none; }
.ground { fill: #ffffff; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .soft { fill: #9aa4ae; }
  .line { stroke: #6e7681; }
  .ground { fill: #0d1117; }
}"""


class Rectangle(NamedTuple):
    x: float
    y: float
    width: float
    height: float

    @property
    def attributes(self) -> str:
        return f'x="{self.x:g}" y="{self.y:g}" width="{self.width:g}" height="{self.height:g}"'


class Drawing:
    """SVG elements, and the size that they have reached."""

    def __init__(self, colours: Mapping[str, str]) -> None:
        self.elements: list[str] = []
        self.width = 320.0
        self.height = float(MARGIN)
        self._colours = colours

    def text(self, x: float, y: float, words: str, style: str = "") -> None:
        named = f' class="{style}"' if style else ""
        self.elements.append(f'<text x="{x:g}" y="{y:g}"{named}>{escape(words)}</text>')
        self._reach(x + LETTER * len(words), y)

    def box(self, box: Rectangle, series: str | None) -> None:
        """A box in a tint of the series' colour that keeps text readable."""
        colour = self._colours.get(series or "", NO_SERIES)
        tint = f'fill="{colour}" fill-opacity="0.22" stroke="{colour}"'
        self.elements.append(f'<rect {box.attributes} rx="4" class="ground"/>')
        self.elements.append(f'<rect {box.attributes} rx="4" {tint}/>')
        self._reach(box.x + box.width, box.y + box.height)

    def frame(self, box: Rectangle) -> None:
        self.elements.append(f'<rect {box.attributes} rx="6" class="line"/>')
        self._reach(box.x + box.width, box.y + box.height)

    def arrow(self, start: Rectangle, end: Rectangle) -> None:
        """A curve that leaves ``start`` to the right and arrives at ``end`` from the left."""
        x1, y1 = start.x + start.width, start.y + start.height / 2
        x2, y2 = end.x, end.y + end.height / 2
        bend = max(20.0, (x2 - x1) / 2)
        path = f"M{x1:g} {y1:g} C{x1 + bend:g} {y1:g} {x2 - bend:g} {y2:g} {x2:g} {y2:g}"
        self.elements.append(f'<path class="line" d="{path}" marker-end="url(#arrow)"/>')

    def _reach(self, x: float, y: float) -> None:
        self.width = max(self.width, x + MARGIN)
        self.height = max(self.height, y)


def render(document: Document) -> str:
    """The picture of a document. Tables and lines appear in text only."""
    drawing = Drawing(dict(zip(_series(document), cycle(COLOURS), strict=False)))
    drawing.text(MARGIN, 28, document.title, "head")
    for block in document.blocks:
        match block:
            case Legend():
                _legend(drawing, block)
            case Grid():
                _grid(drawing, block)
            case Flow():
                _flow(drawing, block)
    return _file(document.title, drawing)


def _file(title: str, drawing: Drawing) -> str:
    width, height = drawing.width, drawing.height + MARGIN
    size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
    body = "\n".join(drawing.elements)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_STYLE}\n</style>\n"
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" '
        'markerHeight="8" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#8c959f"/></marker></defs>'
        f'\n<rect class="ground" width="100%" height="100%"/>\n{body}\n</svg>\n'
    )


def _series(document: Document) -> Iterable[str]:
    """All series of a document, in order of appearance."""
    series: dict[str, None] = {}
    for block in document.blocks:
        match block:
            case Legend():
                series |= dict.fromkeys(block.series)
            case Grid():
                series |= {name: None for row in block.rows for cell in row.cells for name in cell}
            case Flow():
                series |= dict.fromkeys(node.series for node in block.nodes if node.series)
    return series


def _legend(drawing: Drawing, legend: Legend) -> None:
    for name, words in legend.series.items():
        y = drawing.height + GAP
        drawing.box(Rectangle(MARGIN, y, 12, 12), name)
        drawing.text(MARGIN + 20, y + 11, f"{name}  {words}")


def _grid(drawing: Drawing, grid: Grid) -> None:
    drawing.text(MARGIN, drawing.height + 2 * GAP + 12, grid.title, "head")
    words = [text for row in grid.rows for cell in row.cells for text in cell.values()]
    width = max(56.0, LETTER * max(map(len, words), default=3) + 16)
    lines = max((len(cell) for row in grid.rows for cell in row.cells), default=1)
    height = lines * LINE + 20.0
    for row in elide(grid.rows, MOST_ROWS):
        y = drawing.height + GAP
        if row is None:
            hidden = f"… {len(grid.rows) - MOST_ROWS} more {grid.row}s"
            drawing.text(MARGIN, y + 12, hidden, "soft")
            continue
        drawing.text(MARGIN, y + height / 2, f"{grid.row} {row.label}", "soft")
        for column, cell in enumerate(row.cells):
            x = MARGIN + LABEL_WIDTH + column * (width + GAP)
            _cell(drawing, Rectangle(x, y, width, height), column, cell)


def _cell(drawing: Drawing, box: Rectangle, column: int, cell: Mapping[str, str]) -> None:
    drawing.frame(box)
    drawing.text(box.x + 6, box.y + 13, f"{column}", "soft")
    for index, (name, words) in enumerate(cell.items()):
        top = box.y + 17 + index * LINE
        drawing.box(Rectangle(box.x + 4, top, box.width - 8, LINE - 3), name)
        drawing.text(box.x + 8, top + 13, words)


def _flow(drawing: Drawing, flow: Flow) -> None:
    """Draw the arrows, then the nodes over them, in a column for each level."""
    places = dict(_places(flow, drawing.height + 2 * GAP))
    for start, end in flow.arrows:
        drawing.arrow(places[start], places[end])
    for node in flow.nodes:
        box = places[node.name]
        drawing.box(box, node.series)
        for index, words in enumerate(_words(node)):
            style = "head" if index == 0 else "soft"
            drawing.text(box.x + 8, box.y + 16 + index * LINE, words, style)


def _places(flow: Flow, top: float) -> Iterator[tuple[str, Rectangle]]:
    x = float(MARGIN)
    for level in sorted({node.level for node in flow.nodes}):
        column = {node.name: _words(node) for node in flow.nodes if node.level == level}
        width = LETTER * max(len(words) for lines in column.values() for words in lines) + 16
        y = top
        for name, lines in column.items():
            height = LINE * len(lines) + 6.0
            yield name, Rectangle(x, y, width, height)
            y += height + NODE_GAPS[1]
        x += width + NODE_GAPS[0]


def _words(node: Node) -> list[str]:
    description = [node.description] if node.description else []
    return [node.name, *description, *(f"{MARKS[line.mark]}{line.words}" for line in node.lines)]
