"""Rendering of documents (legends, grids and graphs) as SVG for light and dark backgrounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle, pairwise
from statistics import fmean
from typing import Final, NamedTuple
from xml.sax.saxutils import escape

from slurmrl.display.terminal import Document, Flow, Grid, Legend, Lines, Node, Table, elide, table

COLORS: Final = ("#4477aa", "#ee6677", "#228833", "#aa8800", "#66ccee", "#aa3377")
"""Colors of the series, in order of appearance (Tol's bright palette)."""
NO_SERIES: Final = "#8c959f"
MOST_ROWS: Final = 32
"""Maximum number of rows of a grid in the picture."""
MARKS: Final = {"": "", "in": "← ", "out": "→ "}
LETTER: Final = 7.4
LINE: Final = 20
MARGIN: Final = 16
LABEL_WIDTH: Final = 84
"""Width of the labels left of a grid."""
GAP: Final = 8
"""Gap between the cells of a grid."""
NODE_GAPS: Final = (12, 44)
"""Gaps between the nodes of a graph: horizontal and vertical."""
LANE: Final = 10
"""Width of the lane in which arrows pass a row of nodes."""
_STYLE: Final = """\
text { font: 12px ui-monospace, monospace; fill: #1b1f24; white-space: pre; }
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
    def bottom(self) -> float:
        return self.y + self.height

    @property
    def middle(self) -> float:
        return self.x + self.width / 2

    @property
    def attributes(self) -> str:
        return f'x="{self.x:g}" y="{self.y:g}" width="{self.width:g}" height="{self.height:g}"'


class Drawing:
    """A picture in progress: its SVG elements and its size so far."""

    def __init__(self, colors: Mapping[str, str]) -> None:
        self.elements: list[str] = []
        self.width = 320.0
        self.height = float(MARGIN)
        self._colors = colors

    def text(self, x: float, y: float, words: str, style: str = "") -> None:
        named = f' class="{style}"' if style else ""
        self.elements.append(f'<text x="{x:g}" y="{y:g}"{named}>{escape(words)}</text>')
        self._reach(x + LETTER * len(words), y)

    def box(self, box: Rectangle, series: str | None) -> None:
        """Draw a box in a light tint of the series' color."""
        color = self._colors.get(series or "", NO_SERIES)
        tint = f'fill="{color}" fill-opacity="0.22" stroke="{color}"'
        self.elements.append(f'<rect {box.attributes} rx="4" class="ground"/>')
        self.elements.append(f'<rect {box.attributes} rx="4" {tint}/>')
        self._reach(box.x + box.width, box.y + box.height)

    def frame(self, box: Rectangle) -> None:
        self.elements.append(f'<rect {box.attributes} rx="6" class="line"/>')
        self._reach(box.x + box.width, box.y + box.height)

    def arrow(self, boxes: Sequence[Rectangle]) -> None:
        """Draw a curve from the first box, through all boxes between, to the last box."""
        start, *others = boxes
        path = f"M{start.middle:g} {start.bottom:g}"
        for before, box in pairwise(boxes):
            bend = (box.y - before.bottom) / 2
            path += f" C{before.middle:g} {before.bottom + bend:g}"
            path += f" {box.middle:g} {box.y - bend:g} {box.middle:g} {box.y:g}"
            if box is not others[-1]:
                path += f" V{box.bottom:g}"
                self._reach(box.x + box.width, box.bottom)
        self.elements.append(f'<path class="line" d="{path}" marker-end="url(#arrow)"/>')

    def _reach(self, x: float, y: float) -> None:
        self.width = max(self.width, x + MARGIN)
        self.height = max(self.height, y)


def render(document: Document) -> str:
    """Return the picture of a document as SVG."""
    drawing = Drawing(dict(zip(_series(document), cycle(COLORS), strict=False)))
    drawing.text(MARGIN, 28, document.title, "head")
    for block in document.blocks:
        match block:
            case Table():
                rows = table([block.headings, *block.rows])
                _lines(drawing, block.title, [*rows, *block.note.splitlines()])
            case Lines():
                _lines(drawing, block.title, block.lines)
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
    """Return the names of all series of a document, in order of appearance."""
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


def _lines(drawing: Drawing, title: str, lines: Iterable[str]) -> None:
    """Draw lines below an optional title; keep repeated spaces."""
    drawing.height += GAP
    if title:
        drawing.text(MARGIN, drawing.height + GAP + 12, title, "head")
    for line in lines:
        drawing.text(MARGIN, drawing.height + LINE, line)


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
    """Draw the arrows, then the nodes on top of them, with one row of nodes for each level."""
    levels = {node.name: node.level for node in flow.nodes}
    rows = _rows(flow, levels, drawing.height + 2 * GAP)
    for start, end in flow.arrows:
        passed = (rows[level][start] for level in range(levels[start], levels[end]))
        drawing.arrow([*passed, rows[levels[end]][end]])
    for node in flow.nodes:
        box = rows[node.level][node.name]
        drawing.box(box, node.series)
        for index, words in enumerate(_words(node)):
            style = "head" if index == 0 else "soft"
            drawing.text(box.x + 8, box.y + 16 + index * LINE, words, style)


def _rows(flow: Flow, levels: Mapping[str, int], top: float) -> list[dict[str, Rectangle]]:
    """Return the boxes of each level by node name; each level is a centered row.

    Within a row, boxes have the order of the nodes at which their arrows start. A row also has
    lanes for arrows that pass it: the key of a lane is the node at which its arrows start.
    """
    parents: dict[str, list[str]] = {name: [] for name in levels}
    last = dict(levels)
    for start, end in flow.arrows:
        parents[end].append(start)
        last[start] = max(last[start], levels[end])
    rows: list[dict[str, Rectangle]] = []
    y = top
    for level in range(max(levels.values()) + 1):
        before = rows[-1] if rows else {}
        nodes = {node.name: _words(node) for node in flow.nodes if node.level == level}
        widths = {name: LETTER * max(map(len, lines)) + 16 for name, lines in nodes.items()}
        widths |= {name: float(LANE) for name in levels if levels[name] < level < last[name]}
        wished = {
            name: fmean([before[one].middle for one in parents[name]] or [0.0])
            if name in nodes
            else before[name].middle
            for name in widths
        }
        height = LINE * max(map(len, nodes.values()), default=0) + 6.0
        room = sum(widths.values()) + NODE_GAPS[0] * (len(widths) - 1)
        x, row = fmean(wished.values()) - room / 2, {}
        for name in sorted(widths, key=wished.__getitem__):
            row[name] = Rectangle(x, y, widths[name], height)
            x += widths[name] + NODE_GAPS[0]
        rows.append(row)
        y += height + NODE_GAPS[1]
    shift = MARGIN - min(box.x for row in rows for box in row.values())
    return [{name: box._replace(x=box.x + shift) for name, box in row.items()} for row in rows]


def _words(node: Node) -> list[str]:
    description = [node.description] if node.description else []
    return [node.name, *description, *(f"{MARKS[line.mark]}{line.words}" for line in node.lines)]
