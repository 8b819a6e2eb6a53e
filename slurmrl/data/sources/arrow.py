"""Parquet files, and the Arrow files that Hugging Face `datasets` saves. Torch-free."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmrl.data.sources.base import (
    RowSource,
    SourceRow,
    fingerprint_of,
    state_of,
    unreadable,
)
from slurmrl.data.sources.jsonl import parsed
from slurmrl.errors import ConfigError, MissingDependencyError, Problem

if TYPE_CHECKING:
    import pyarrow

BATCH_ROWS = 256


class ArrowFiles(RowSource):
    """The rows of the files one after the other, as JSON: dates are ISO texts, decimals texts."""

    _first: list[int]

    def rows(self) -> Iterator[SourceRow]:
        pyarrow = _pyarrow(self.path)
        self._first = []
        """The number of the first row of each file."""
        number = made = 0
        try:
            self.state = state_of(self.files)
            sizes = [path.stat().st_size for path in self.files]
            self.size = sum(sizes)
            for place, path in enumerate(self.files):
                self._first.append(number + 1)
                for batch, share in _batches(path):
                    for row in batch.to_pylist():
                        if self._most_bytes is not None and made > self._most_bytes:
                            self.whole = False
                            return
                        number += 1
                        found = _converted(number, row)
                        made += len(found.raw)
                        yield found
                    self.done = sum(sizes[:place]) + int(share * sizes[place])
                self.done = sum(sizes[: place + 1])
        except pyarrow.ArrowInvalid as error:
            reason = (str(error).splitlines() or ["damaged"])[0]
            message = f"not a whole {path.suffix.removeprefix('.')} file: {reason}"
            raise ConfigError((Problem(str(path), "", message),)) from error
        except OSError as error:
            raise unreadable(self.path, error) from error

    def fingerprint(self) -> str:
        return fingerprint_of(self.files, lambda share: None)

    def where(self, number: int) -> str:
        place = bisect_right(self._first, number) - 1
        return f"{self.files[place]}, row {number - self._first[place] + 1}"


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        message = f"{path}: needs the package pyarrow: pip install pyarrow"
        raise MissingDependencyError(message) from error
    return pyarrow


def _batches(path: Path) -> Iterator[tuple[pyarrow.RecordBatch, float]]:
    """The rows of a file in batches, with the share of the file that each begins at."""
    if path.suffix == ".parquet":
        from pyarrow import parquet

        with parquet.ParquetFile(path) as table:
            rows, total = 0, max(table.metadata.num_rows, 1)
            for batch in table.iter_batches(batch_size=BATCH_ROWS):
                yield batch, rows / total
                rows += batch.num_rows
        return
    from pyarrow import OSFile, ipc

    # not mapped: see `data.prepared`
    with OSFile(str(path)) as file, ipc.open_stream(file) as stream:
        for batch in stream:
            for start in range(0, batch.num_rows, BATCH_ROWS):
                yield batch.slice(start, BATCH_ROWS), min(file.tell() / max(file.size(), 1), 1.0)


def _converted(number: int, row: dict[str, Any]) -> SourceRow:
    try:
        return parsed(number, json.dumps(row, default=_plain, ensure_ascii=False).encode())
    except _NoJsonError as error:
        return SourceRow(number, b"", None, str(error))


class _NoJsonError(TypeError):
    """A value has no JSON form."""


def _plain(value: Any) -> str:
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    kind = type(value).__name__
    raise _NoJsonError(f"holds a value of type {kind}, which has no JSON form; drop that column")
