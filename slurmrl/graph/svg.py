"""Pieces of SVG, written as text, that can be read on light and on dark ground."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final
from xml.sax.saxutils import escape

COLOURS: Final = ("#4477aa", "#ee6677", "#228833", "#aa8800", "#66ccee", "#aa3377")
"""For models, in the order of their names' appearance (Tol's bright palette)."""
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


def document(width: float, height: float, title: str, parts: Iterable[str]) -> str:
    """A whole picture; ``title`` is what a screen reader says."""
    size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_STYLE}\n</style>\n"
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" '
        'markerHeight="8" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#8c959f"/></marker></defs>'
        f'\n<rect class="ground" width="100%" height="100%"/>\n{body}\n</svg>\n'
    )


def text(x: float, y: float, words: str, kind: str = "", *, anchor: str = "start") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{named}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, colour: str) -> str:
    """Tinted, so that letters on it keep their contrast on either ground."""
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4"'
    return f'<rect {place} fill="{colour}" fill-opacity="0.22" stroke="{colour}"/>'


def frame(x: float, y: float, width: float, height: float) -> str:
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"'
    return f'<rect {place} class="line"/>'


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    """A curve that leaves to the right and arrives from the left."""
    bend = max(20.0, (x2 - x1) / 2)
    path = f"M{x1:g} {y1:g} C{x1 + bend:g} {y1:g} {x2 - bend:g} {y2:g} {x2:g} {y2:g}"
    return f'<path class="line" d="{path}" marker-end="url(#arrow)"/>'
