"""Find some rows of a dataset of prompts, and completions for them.

No more of the file is read than necessary.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from slurmrl.config.schema import Dataset
from slurmrl.data.records import MOST_PROBLEMS, RecordReader, RowChecks, id_of
from slurmrl.data.rows import reference
from slurmrl.data.types import own_convert, row_type
from slurmrl.data.types.base import has
from slurmrl.data.types.prompt import Prompts
from slurmrl.desk.inspection import Selection
from slurmrl.errors import ConfigError, Problem, UsageError


@dataclass(frozen=True)
class DataRow:
    number: int
    """Its line in a JSONL file; its place in other files. From 1."""
    id: str
    where: str
    """Its place, for messages."""
    values: dict[str, Any]


@dataclass(frozen=True)
class Item:
    """One completion to judge, for a row of the data."""

    row: DataRow
    completion: str
    finished: bool = True
    """Whether it ended by itself."""


class FoundRows:
    """Rows of a dataset that are found on demand.

    The methods raise ConfigError if a row that they return lacks the keys of the dataset's type, or
    if a row before it is not a JSON object.
    """

    def __init__(self, config: Dataset) -> None:
        kind = row_type(config)
        assert isinstance(kind, Prompts), "the caller chose a dataset of prompts"
        self.config = config
        self._kind = kind

    def first(self, count: int) -> list[DataRow]:
        """The first rows; fewer if there are not as many."""
        reader = self._reader()
        with closing(self._rows(reader)) as rows:
            return self._checked(reader, islice(rows, count))

    def named(self, names: set[str]) -> dict[str, DataRow]:
        """The rows of ids, or of sample ids, which end in ``@`` and the epoch, by these names.

        The file is read until all are found.
        """
        if not names:
            return {}
        named: dict[str, list[str]] = {}
        for name in names:
            for id in (name, name.rpartition("@")[0]):
                named.setdefault(id, []).append(name)
        found: dict[str, DataRow] = {}
        reader = self._reader()
        with closing(self._rows(reader)) as rows:
            for row in rows:
                found |= {name: row for name in named.get(row.id, ()) if name not in found}
                if found.keys() == names:
                    break
        self._checked(reader, {row.number: row for row in found.values()}.values())
        return found

    def prompt(self, row: DataRow) -> str:
        """See `Prompts.text`."""
        return self._kind.text(row.values)

    def answer(self, row: DataRow) -> str:
        """The reference answer; "" for none."""
        return reference(self.config, row.values)

    def _reader(self) -> RecordReader:
        config = self.config
        convert = own_convert(self._kind)
        return RecordReader(Path(config.path), config.id_key, config.split, convert=convert)

    def _rows(self, reader: RecordReader) -> Generator[DataRow]:
        for record in reader:
            id = id_of(record.row, self.config.id_key, record.number)
            yield DataRow(record.number, id, reader.where(record.number), record.row)

    def _checked(self, reader: RecordReader, rows: Iterable[DataRow]) -> list[DataRow]:
        """The rows, after all have been read."""
        checks = RowChecks(self._kind, reader.where)
        checked = []
        for row in rows:
            checks.add(row.number, row.values)
            checked.append(row)
        reader.finish()
        if checked:
            checks.finish()
        return checked


def find_items(rows: FoundRows, selection: Selection) -> list[Item]:
    """The completions of a selection with their rows.

    :raises ConfigError: rows that cannot be used; lines of a file without a completion, or of rows
        that are not in the data.
    :raises UsageError: the rows have no answers.
    """
    if selection.file is not None:
        return _of_file(rows, Path(selection.file), selection.rows)
    assert selection.rows is not None, "only all completions of a file can be chosen"
    first, texts = rows.first(selection.rows), selection.completions
    if texts:
        return [Item(row, text) for row in first for text in texts]
    if not has(first[0].values, rows.config.answer_key):
        raise UsageError(
            f"{rows.config.path} has no answers under '{rows.config.answer_key}': "
            "give --completion or --completions"
        )
    return [Item(row, rows.answer(row)) for row in first]


def _of_file(rows: FoundRows, path: Path, count: int | None) -> list[Item]:
    """Return the first completions of a JSONL file of ``{"id": …, "completion": …}``.

    A run's ``samples/`` are such files. Without ids, completions belong to the first, second, …
    row.
    """
    reader = RecordReader(path, "")  # an id may occur more than once
    given = [(record.number, record.row) for record in islice(reader, count)]
    reader.finish()
    named = rows.named({str(row["id"]) for _, row in given if "id" in row})
    unnamed = any("id" not in row for _, row in given)
    first = rows.first(len(given)) if unnamed else []
    problems: list[Problem] = []
    items = []
    for position, (line, values) in enumerate(given):
        where, text = f"{path}:{line}", values.get("completion")
        row = first[position] if position < len(first) else None
        if "id" in values:
            row = named.get(str(values["id"]))
        if not isinstance(text, str):
            problems.append(Problem(where, "completion", "must be a text"))
        elif row is None:
            which = repr(values["id"]) if "id" in values else f"number {position + 1}"
            message = f"{rows.config.path} has no row {which}"
            problems.append(Problem(where, "id", message))
        else:
            items.append(Item(row, text, values.get("finished") is not False))
    if problems:
        raise ConfigError(tuple(problems[:MOST_PROBLEMS]))
    return items
