from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from slurmrl.display import svg, terminal
from slurmrl.display.terminal import (
    Document,
    Flow,
    Grid,
    GridRow,
    Legend,
    Lines,
    Node,
    NodeLine,
    Table,
    elide,
)

SVG = "{http://www.w3.org/2000/svg}"


def grid(hosts: int) -> Grid:
    rows = [GridRow(str(host), [{"actor": "d0", "ref": "all"}, {"ref": "d1"}])
            for host in range(hosts)]  # fmt: skip
    return Grid("trainer", "host", "GPU", "model", rows)


def texts(document: Document) -> list[str | None]:
    return [one.text for one in ElementTree.fromstring(svg.render(document)).iter(f"{SVG}text")]


def test_text_shows_every_block_once_and_in_order() -> None:
    table = Table(("NAME", "SIZE"), [("a", "1"), ("long", "2")], "sizes", "in GiB")
    legend = Legend({"actor": "trained", "ref": "not trained"})
    node = Node("gen", 0, [NodeLine("ids", "out"), NodeLine("prompts", "in")], "generate")
    flow = Flow([node], [])
    shown = Document("e/1", [table, legend, grid(1), flow, Lines("notes:", ["one"])], "2 GPUs")
    assert terminal.as_text(shown) == (
        "e/1: 2 GPUs\n\n"
        "sizes\n  NAME  SIZE\n  a     1\n  long  2\nin GiB\n\n"
        "  actor  trained\n  ref    not trained\n\n"
        "trainer\n  HOST  MODEL  GPU 0  GPU 1\n"
        "  0     actor  d0     -\n        ref    all    d1\n\n"
        "gen: generate\n  -> ids\n  <- prompts\n\n"
        "notes:\n  one"
    )


def test_series_has_one_color_in_the_whole_picture() -> None:
    shown = Document("e/1", [Legend({"actor": "trained", "ref": "not trained"}), grid(2)])
    tinted = [
        one.get("fill") for one in ElementTree.fromstring(svg.render(shown)).iter(f"{SVG}rect")
        if one.get("fill-opacity")
    ]  # fmt: skip
    actor, ref = svg.COLORS[:2]
    assert tinted == [actor, ref, *2 * [actor, ref, ref]]


@pytest.mark.parametrize(("hosts", "drawn"), [(16, 16), (17, 17), (64, 32)])
def test_long_grid_elides_rows_before_the_last(hosts: int, drawn: int) -> None:
    shown = Document("e/1", [grid(hosts)])
    lines = terminal.as_text(shown).splitlines()
    assert lines[-2].split()[0] == str(hosts - 1)
    assert ("  …     …      …      …" in lines) == (hosts > terminal.MOST_ROWS)
    assert sum("actor" in line for line in lines) == min(hosts, terminal.MOST_ROWS)
    words = texts(shown)
    assert f"host {hosts - 1}" in words
    assert sum(str(one).startswith("host ") for one in words) == drawn
    assert ("… 32 more hosts" in words) == (hosts == 64)


def test_elided_rows_come_before_the_last() -> None:
    assert elide([1, 2, 3], 3) == [1, 2, 3]
    assert elide([1, 2, 3, 4], 3) == [1, 2, None, 4]


def test_labels_are_escaped_and_stay_within_the_picture() -> None:
    shown = Document("a <b> & c", [Legend({"actor": "x" * 200})])
    root = ElementTree.fromstring(svg.render(shown))
    assert float(root.get("width") or 0) > 200 * svg.LETTER
    assert "a <b> & c" in texts(shown)


def test_arrows_do_not_cross_boxes() -> None:
    """The calls two and three rows below read ``a``, with ``b`` and ``c`` between them."""
    names = {"a": 0, "b": 1, "c": 2, "d": 2, "e": 3}
    nodes = [Node(name, level, [NodeLine("key")] * 3) for name, level in names.items()]
    arrows = [("a", "b"), ("b", "c"), ("a", "d"), ("c", "e"), ("d", "e"), ("a", "e")]
    root = ElementTree.fromstring(svg.render(Document("g", [Flow(nodes, arrows)])))
    boxes = [
        {key: float(one.get(key) or 0) for key in ("x", "y", "width", "height")}
        for one in root.iter(f"{SVG}rect") if one.get("fill-opacity")
    ]  # fmt: skip
    assert len(boxes) == len(names)
    passed = 0
    for path in root.findall(f"{SVG}path"):
        numbers = re.findall(r"([MCV])([^MCV]*)", path.get("d") or "")
        x = 0.0
        for letter, given in numbers:
            values = [float(one) for one in given.split()]
            if letter != "V":
                x, y = values[-2:]
                continue
            for box in boxes:
                other = box["y"] > values[0] or box["y"] + box["height"] < y
                assert other or not box["x"] <= x <= box["x"] + box["width"]
            assert 0 < x < float(root.get("width") or 0)
            passed += 1
    assert passed == 1 + 2, "a to d passes one row, a to e two"


def test_graph_fits_on_a_page_with_three_nodes_per_level() -> None:
    nodes = [Node("a", 0, [NodeLine("k" * 20)]), *(Node(n, 1, [NodeLine("k" * 20)]) for n in "bcd")]
    shown = Document("g", [Flow(nodes, [("a", "b"), ("a", "c"), ("a", "d")])])
    root = ElementTree.fromstring(svg.render(shown))
    lefts = [float(one.get("x") or 0) for one in root.iter(f"{SVG}rect") if one.get("fill-opacity")]
    assert lefts[0] == lefts[2], "the parent is above the middle of its row"
    assert min(lefts) == svg.MARGIN
    assert float(root.get("width") or 0) < 600


def test_tables_and_lines_are_drawn_in_columns() -> None:
    rows = Table(("NAME", "SIZE"), [("a", "1"), ("long", "2")], "sizes", "in GiB")
    shown = texts(Document("e/1", [rows, Lines("notes:", ["one"])]))
    assert shown == ["e/1", "sizes", "NAME  SIZE", "a     1", "long  2", "in GiB", "notes:", "one"]
