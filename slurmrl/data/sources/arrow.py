"""Parquet files, and the Arrow files that Hugging Face `datasets` saves. Torch-free."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Generator, Iterator
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
SCHEMA_KEYS = ("parameters", "input_schema", "arguments")
"""Keys that tools and tool calls have beside their names."""


class ArrowFiles(RowSource):
    """The rows of the files one after the other, as JSON: dates are ISO texts, decimals texts."""

    _first: list[int]

    def rows(self) -> Generator[SourceRow]:
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
        except pyarrow.ArrowNotImplementedError as error:
            message = f"pyarrow cannot read it: {error}; save the rows as JSONL"
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
        plain = json.dumps(_with_own_keys(row), default=_plain, ensure_ascii=False)
        return parsed(number, plain.encode())
    except _NoJsonError as error:
        return SourceRow(number, b"", None, str(error))


def _with_own_keys(value: Any) -> Any:
    """Return a value whose tools and tool calls have no null under a key.

    Arrow gives all objects of a column the same keys, and a null where a row had none.
    """
    if isinstance(value, list):
        return [_without_nulls(each) if _is_tool(each) else _with_own_keys(each) for each in value]
    if isinstance(value, dict):
        return {
            key: _without_nulls(each) if key == "tool_calls" else _with_own_keys(each)
            for key, each in value.items()
        }
    return value


def _is_tool(value: Any) -> bool:
    """Whether a value has the form of a tool's JSON schema."""
    if not isinstance(value, dict):
        return False
    function = value.get("function")
    named = function if isinstance(function, dict) else value
    return isinstance(named.get("name"), str) and not named.keys().isdisjoint(SCHEMA_KEYS)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return value


class _NoJsonError(TypeError):
    """A value has no JSON form."""


def _plain(value: Any) -> str:
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    kind = type(value).__name__
    raise _NoJsonError(f"holds a value of type {kind}, which has no JSON form; drop that column")
