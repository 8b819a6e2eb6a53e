"""The samples that a trial has kept."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slurmrl.errors import CorruptFileError
from slurmrl.fsio import atomic, documents, lines
from slurmrl.fsio.shapes import INTEGER, NUMBER, TEXT, Fields, list_of, table
from slurmrl.report.contents import Samples

MOST_ROWS = 10_000
MOST_TEXT = 6_000
"""Characters of a text."""
FIELDS: Fields = {
    "step": INTEGER,
    "id": TEXT,
    "index": INTEGER,
    "prompt": TEXT,
    "completion": TEXT,
    "reward": NUMBER,
    "turns": list_of(table({"wrote": TEXT, "read": TEXT})),
}
_FILE = re.compile(r"step-[0-9]{8,}\.jsonl")


def read_samples(folder: Path, most: int = MOST_ROWS) -> Samples:
    """Return at most ``most`` rows. With more, the steps between are left out evenly: the first
    and the newest step are kept. Raises EnvironmentFailure."""
    try:
        names = sorted(name for name in atomic.list_names(folder) if _FILE.fullmatch(name))
    except FileNotFoundError:
        names = []
    if not names:
        return Samples(rows=(), steps=0, shown=0)
    each = max(len(list(_rows(folder / names[-1]))), 1)
    chosen = _spread(names, max(most // each, 2))
    rows = [row for name in chosen for row in _rows(folder / name)]
    return Samples(rows=rows[-most:], steps=len(names), shown=len(chosen))


def _spread(names: list[str], most: int) -> list[str]:
    if len(names) <= most:
        return names
    last = len(names) - 1
    return [names[number * last // (most - 1)] for number in range(most)]


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a step; damaged ones are left out."""
    try:
        with lines.opened(path) as file:
            for raw in file.forward():
                try:
                    yield _cut(documents.parse(raw, path, FIELDS, ("step", "prompt", "completion")))
                except CorruptFileError:
                    continue
    except FileNotFoundError:
        return


def _cut(value: Any) -> Any:
    """Return a value whose texts have at most MOST_TEXT characters."""
    if isinstance(value, str) and len(value) > MOST_TEXT:
        return f"{value[:MOST_TEXT]} … {len(value) - MOST_TEXT} more characters"
    if isinstance(value, list):
        return [_cut(one) for one in value]
    if isinstance(value, dict):
        return {key: _cut(one) for key, one in value.items()}
    return value
