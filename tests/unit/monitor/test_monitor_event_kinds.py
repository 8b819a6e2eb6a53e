"""The page of events lists exactly the kinds and fields that the code writes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import get_args

import slurmrl
from slurmrl.run.events import EventKind

KINDS = get_args(EventKind)
PAGE = Path(__file__).parents[3] / "docs" / "reference" / "events.md"
DEFINED = Path(slurmrl.__file__).parent / "run" / "events.py"


@cache
def trees() -> tuple[ast.Module, ...]:
    """The modules that may write events."""
    paths = (path for path in DEFINED.parents[1].rglob("*.py") if path != DEFINED)
    return tuple(ast.parse(path.read_text(encoding="utf-8")) for path in paths)


def documented() -> dict[str, set[str]]:
    """Return the fields of each kind in the tables of the page."""
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| .* \|$", PAGE.read_text(encoding="utf-8"), re.M)
    assert len(rows) == len({kind for kind, _ in rows}), "a kind has two rows"
    return {kind: set(re.findall(r"`(\w+)`", fields)) for kind, fields in rows}


def written() -> Iterator[tuple[str, set[str]]]:
    """Return the kind and named fields of each call ``….write("kind", field=…)``."""
    for tree in trees():
        for node in ast.walk(tree):
            match node:
                case ast.Call(
                    func=ast.Attribute(attr="write"), args=[ast.Constant(value=str(kind))]
                ) if kind in KINDS:
                    yield kind, {one.arg for one in node.keywords if one.arg}


def test_events_page_lists_each_kind_once() -> None:
    assert sorted(documented()) == sorted(KINDS)


def test_each_kind_of_event_is_written_by_the_code() -> None:
    texts = {
        node.value
        for tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert set(KINDS) - texts == set()


def test_events_page_lists_the_fields_that_are_written() -> None:
    page, calls = documented(), list(written())
    assert len(calls) >= 30
    lacking = [(kind, fields - page[kind]) for kind, fields in calls if fields - page[kind]]
    assert lacking == []
