"""Some rows of a dataset of prompts, found without reading more of the file than necessary."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from slurmrl.config.schema import Dataset
from slurmrl.data.records import RecordReader, id_of
from slurmrl.data.row_checks import RowChecks
from slurmrl.data.rows import reference
from slurmrl.data.types import row_type
from slurmrl.data.types.prompt import Prompts


@dataclass(frozen=True)
class DataRow:
    number: int
    """Its line in a JSONL file; its place in other files. From 1."""
    id: str
    where: str
    """Its place, for messages."""
    values: dict[str, Any]


class FoundRows:
    """The methods raise ConfigError where a row that they return does not have the keys of the
    dataset's type, or where a row before it is not a JSON object."""

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
        """The rows of ids, or of sample ids, which end in ``@`` and the epoch, by these names. The
        file is read until all are found."""
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
        return RecordReader(Path(self.config.path), self.config.id_key, self.config.split)

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
