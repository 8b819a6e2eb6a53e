"""``metrics.csv``: a row for each step, and a column for each metric."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from slurmrl.fsio import atomic, lines
from slurmrl.monitor.metrics import TIME
from slurmrl.monitor.sinks.base import Lines, numbers
from slurmrl.monitor.words import plain

FIRST_COLUMNS = ("step", TIME)


class Csv:
    """Appends rows. A metric that has no column yet (those of the first evaluation) gets one behind
    the others: the file is then replaced as a whole. Columns never move."""

    def __init__(self, path: Path, after: int) -> None:
        self._path = path
        self._columns = list(FIRST_COLUMNS)
        self.last = after if self._cut(after) else -1

    @property
    def kept(self) -> int:
        return self.last

    def log(self, lines: Lines) -> None:
        rows = [_row(line) for line in lines]
        new = {name: None for row in rows for name in row if name not in self._columns}
        columns = [*self._columns, *new]
        added = _text([row.get(name, "") for name in columns] for row in rows)
        if new or not self._path.exists():
            atomic.replace(self._path, _text([columns]) + self._widened(len(new)) + added)
        else:
            atomic.append(self._path, added)
            atomic.sync_file(self._path)
        self._columns = columns
        self.last = lines[-1]["step"]

    def close(self) -> None:
        """Nothing is left to write."""

    def _widened(self, count: int) -> bytes:
        """The rows of the file with ``count`` empty fields at the end of each."""
        try:
            with lines.opened(self._path) as file:
                return b"".join(raw + b"," * count + b"\n" for raw in list(file.forward())[1:])
        except FileNotFoundError:
            return b""

    def _cut(self, after: int) -> bool:
        """Drop rows after that step, and a torn last one: they come again. Return whether there is
        a file; without one, and with one of something else, all steps do."""
        try:
            with lines.opened(self._path) as file:
                header = next(file.forward(), b"")
                rows = ((at, raw) for at, raw in file.backward() if at > 0)
                ends = (at + len(raw) + 1 for at, raw in rows if _step(raw) <= after)
                end, size = next(ends, len(header) + 1), file.size
        except FileNotFoundError:
            return False
        columns = next(csv.reader([header.decode()]), [])
        if tuple(columns[: len(FIRST_COLUMNS)]) != FIRST_COLUMNS:
            atomic.remove(self._path)  # no header: nothing was kept
            return False
        self._columns = columns
        if end != size:
            atomic.truncate(self._path, end)
        return True


def write_whole(path: Path, lines: Lines) -> None:
    """Write a file of all lines, whatever it held before."""
    rows = [_row(line) for line in lines]
    columns = list(dict.fromkeys((*FIRST_COLUMNS, *(name for row in rows for name in row))))
    table = _text([columns, *([row.get(name, "") for name in columns] for row in rows)])
    atomic.replace(path, table)


def _row(line: Mapping[str, Any]) -> dict[str, Any]:
    """Integers stay integers. A name, which may be of the user's code, stays on one line: the
    header is read again as a line."""
    values = {plain(name): line[name] for name in numbers(line)}
    return {"step": line["step"], TIME: line.get(TIME, ""), **values}


def _text(rows: Iterable[Iterable[Any]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _step(raw: bytes) -> int:
    """The step of a row; no step, so one to drop, where something else wrote to the file."""
    field = raw.partition(b",")[0]
    return int(field) if field.isdigit() else 2**60
