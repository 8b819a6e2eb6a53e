"""Read the rows of JSON, JSONL, Parquet and Arrow files. Torch-free.

A new format is a `RowSource` and a case in `open_source`.
"""

from __future__ import annotations

import codecs
import json
import os
from array import array
from bisect import bisect_right
from collections.abc import Generator, Iterator, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from io import BufferedReader
from math import isinf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from slurmrl.data.image_files import as_text, is_content
from slurmrl.data.source_files import (
    NOT_AN_OBJECT,
    NULS,
    READ_BYTES,
    ROW_BYTES,
    RowSource,
    SourceRow,
    arrow_files,
    fingerprint_of,
    head_of,
    not_utf_8,
    other_form,
    state_of,
    state_of_one,
    unreadable,
    wrong_beginning,
)
from slurmrl.errors import ConfigError, MissingDependencyError, Problem

if TYPE_CHECKING:
    import pyarrow


CUT: Final = "the file ends in this row, so the file may be incomplete"
BOM = codecs.BOM_UTF8
TOKEN_CHARACTERS = 16
"""Maximum length of a JSON literal that the end of the buffer can cut. Numbers can be longer, but
cannot be rows."""
BATCH_ROWS = 256
SCHEMA_KEYS = ("parameters", "input_schema", "inputSchema", "arguments")
"""Keys that tools and tool calls have in addition to their names."""
CALL_KEYS = ("tool_calls", "function_call")


def open_source(
    path: Path, split: str | None = None, *, most_bytes: int | None = None
) -> RowSource:
    """Return the rows of a file or folder.

    With ``most_bytes``, return only the first complete rows in about this many bytes.

    :raises ConfigError: a folder without a dataset, a missing split, a FIFO or device, or
        a file that is compressed or not UTF-8 text.
    :raises MissingDependencyError: Parquet or Arrow files without pyarrow.
    :raises EnvironmentFailure: the files cannot be read.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):  # reading a FIFO may never end
        raise ConfigError((Problem(str(path), "", "is not a regular file"),))
    if path.is_dir() or path.suffix == ".parquet":
        return ArrowFiles(path, arrow_files(path, split), most_bytes)
    if split is not None:
        message = f"'{split}' is not allowed: {path} is a single file, which has no splits"
        raise ConfigError((Problem("", "split", message),))
    if message := wrong_beginning(path):
        raise ConfigError((Problem(str(path), "", message),))
    if begins_array(path):
        return JsonArray(path, (path,), most_bytes)
    return JsonLines(path, (path,), most_bytes)


class JsonLines(RowSource):
    """Rows of a JSONL file. Blank lines are skipped. A row's number is its line."""

    def rows(self) -> Generator[SourceRow]:
        first = True
        for number, line in enumerate(self._lines(), start=1):
            if len(line) > ROW_BYTES:
                message = f"the line is longer than {ROW_BYTES >> 20} MiB; a row is one line"
                raise ConfigError((Problem(self.where(number), "", message),))
            if b"\0" in line:
                raise ConfigError((Problem(self.where(number), "", NULS),))
            if not line.strip():
                continue
            try:
                row = parsed(number, line.strip())
            except UnicodeDecodeError as error:  # other lines are probably not UTF-8 either
                raise ConfigError((Problem(self.where(number), "", not_utf_8(error)),)) from error
            if first and row.problem and (form := other_form(self.path)):
                raise ConfigError((Problem(self.where(number), "", form),))
            first = False
            if row.problem and not line.rstrip(b" \t\r").endswith((b"\n", b"}")):
                row = row._replace(problem=f"{row.problem}; {CUT}")
            yield row

    def where(self, number: int) -> str:
        return f"{self.path}:{number}"

    def _lines(self) -> Iterator[bytes]:
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                self.size, self.state = status.st_size, state_of_one(status)
                most = self._most_bytes if self._most_bytes is not None else self.size
                limited = most < self.size
                while line := file.readline(ROW_BYTES + 1):
                    if limited and self.done + len(line) > most:
                        self.whole = False
                        return
                    self.done += len(line)
                    self._digest.update(line)
                    yield line
                self.size = self.done  # the file may have grown during the read
        except OSError as error:
            raise unreadable(self.path, error) from error


def parsed(number: int, raw: bytes) -> SourceRow:
    """Return a row from its JSON text. Raises UnicodeDecodeError."""
    message = NOT_AN_OBJECT
    try:
        row = DECODER.decode(raw.decode("utf-8-sig", "surrogatepass"))
        if isinstance(row, dict):
            return SourceRow(number, raw, row, "")
    except RecursionError:
        message = "not JSON: nested too deeply"
    except json.JSONDecodeError as error:
        message = f"not JSON: {error.msg} in column {error.colno}{_advice(raw)}"
    except UnicodeDecodeError:
        raise
    except ValueError as error:
        message = str(error)
    return SourceRow(number, raw, None, message)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of a row. Raises ValueError for a repeated key."""
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in values if keys.count(key) > 1)
        raise ValueError(f"an object has the key {twice!r} twice; remove one of them")
    return values


def _constant(name: str) -> None:
    """Return null for NaN, which pandas writes for a missing number. Raises ValueError."""
    if name == "NaN":
        return
    raise ValueError(f"{name} is not a JSON value; write null, or leave its key out")


def _float(text: str) -> float:
    """Return a number. Raises ValueError for a number such as 1e400, which would be infinite."""
    if isinf(value := float(text)):
        shown = text if len(text) <= 40 else f"{text[:40]}… of {len(text)} characters"
        raise ValueError(f"the number {shown} is too large; at most 1.79e308 is allowed")
    return value


DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_object, parse_float=_float, parse_constant=_constant
)


def _advice(raw: bytes) -> str:
    """Return advice about a common mistake; "" if none is recognized."""
    if b"\r" in raw:
        return ": lines end with only carriage returns; convert them (tr '\\r' '\\n')"
    if raw.endswith(b",") and raw.startswith(b"{"):
        return ": a comma follows the object; a line has an object and nothing else"
    if raw.startswith(b"{'"):
        return ": Python printed this object; write json.dumps(row) instead"
    return ""


def begins_array(path: Path) -> bool:
    """Return whether the first character of a file is a bracket. Raises EnvironmentFailure."""
    return head_of(path).removeprefix(BOM).lstrip().startswith(b"[")


class JsonArray(RowSource):
    """Rows of a file with one JSON array.

    The elements of the array are parsed one by one. Memory grows with the file only by the line
    number of each element.
    """

    def __init__(self, path: Path, files: Sequence[Path], most_bytes: int | None = None) -> None:
        super().__init__(path, files, most_bytes)
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text = ""
        """Text that was read and not yet dropped."""
        self._at = 0
        """Index of the next character in `_text`."""
        self._line = 1
        """The line of that character."""
        self._lines = array("q")
        """The line of each element."""

    def rows(self) -> Generator[SourceRow]:
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                self.size, self.state = status.st_size, state_of_one(status)
                yield from self._elements(file)
        except OSError as error:
            raise unreadable(self.path, error) from error

    def where(self, number: int) -> str:
        return f"{self.path}:{self._lines[number - 1]}"

    def _elements(self, file: BufferedReader) -> Iterator[SourceRow]:
        self._expect(file, "[")
        if self._next(file) == "]":
            self._step(1)
        else:
            while True:
                if self._next(file) == "]":
                    raise self._wrong("not JSON: ',' before ']'; remove the comma")
                self._lines.append(self._line)
                yield self._element(file)
                if self._expect(file, ",]") == "]":
                    break
                if self._most_bytes is not None and self._consumed() > self._most_bytes:
                    self.whole = False
                    return
        if left := self._next(file):
            lists = "; each line has a list, but a row is an object" if left == "[" else ""
            raise self._wrong(f"{left!r} after the end of the array{lists}")

    def _element(self, file: BufferedReader) -> SourceRow:
        """Parse the next element; read more of the file until the element is complete."""
        number = len(self._lines)
        while True:
            try:
                value, end = DECODER.raw_decode(self._text, self._at)
                if end < len(self._text) or isinstance(value, dict) or not self._read(file, 0):
                    break
            except RecursionError:
                raise self._wrong("not JSON: nested too deeply") from None
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated string")
                cut = cut or error.pos + TOKEN_CHARACTERS >= len(self._text)
                if not (cut and self._read(file, len(self._text) - self._at)):
                    self._step(error.pos - self._at)
                    raise self._wrong(f"not JSON: {error.msg}") from error
            except ValueError as error:
                raise self._wrong(f"in the row that begins here: {error}") from error
            if len(self._text) - self._at > ROW_BYTES:
                raise self._wrong(f"a row is longer than {ROW_BYTES >> 20} MiB")
        raw = self._text[self._at : end].encode()
        self._step(end - self._at)
        if isinstance(value, dict):
            return SourceRow(number, raw, value, "")
        return SourceRow(number, raw, None, NOT_AN_OBJECT)

    def _expect(self, file: BufferedReader, allowed: str) -> str:
        """Skip white space and one of the allowed characters, and return this character."""
        present = self._next(file)
        if not present or present not in allowed:
            wanted = " or ".join(map(repr, allowed))
            found = repr(present) if present else "the end of the file, which may be incomplete"
            raise self._wrong(f"not JSON: expected {wanted}, found {found}")
        self._step(1)
        return present

    def _next(self, file: BufferedReader) -> str:
        """Skip white space. Return the next character; "" at the end of the file."""
        while True:
            rest = len(self._text)
            at = self._at
            while at < rest and self._text[at] in " \t\r\n":
                at += 1
            self._step(at - self._at)
            if at < rest:
                return self._text[at]
            if not self._read(file, 0):
                return ""

    def _read(self, file: BufferedReader, count: int) -> bool:
        """Read at least ``count`` more bytes; return False at the end of the file."""
        data = file.read(max(READ_BYTES, count))
        self._digest.update(data)
        self.done += len(data)
        try:
            text = self._decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            raise self._wrong(not_utf_8(error, " after this line")) from error
        self._text = self._text[self._at :] + text
        self._at = 0
        if (place := text.find("\0")) >= 0:
            self._step(len(self._text) - len(text) + place)
            raise self._wrong(NULS)
        return bool(data)

    def _step(self, characters: int) -> None:
        self._line += self._text.count("\n", self._at, self._at + characters)
        self._at += characters

    def _consumed(self) -> int:
        return self.done - (len(self._text) - self._at)

    def _wrong(self, message: str) -> ConfigError:
        return ConfigError((Problem(f"{self.path}:{self._line}", "", message),))


class ArrowFiles(RowSource):
    """Reads the rows of files in order, as JSON with strings for dates and decimals."""

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
                    for row in _rows(batch):
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
            form = "" if wrong_beginning(path) else other_form(path)
            message = form or f"not a complete {path.suffix.removeprefix('.')} file: {reason}"
            raise ConfigError((Problem(str(path), "", message),)) from error
        except (pyarrow.ArrowNotImplementedError, ValueError, OverflowError) as error:
            message = f"pyarrow cannot read it: {error}; save the rows as JSONL"
            raise ConfigError((Problem(self.where(number + 1), "", message),)) from error
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
    """Yield the rows of a file in batches, with the fraction of the file before each batch."""
    if path.suffix == ".parquet":
        from pyarrow import parquet

        with parquet.ParquetFile(path) as table:
            rows, total = 0, max(table.metadata.num_rows, 1)
            for batch in table.iter_batches(batch_size=BATCH_ROWS):
                yield batch, rows / total
                rows += batch.num_rows
        return
    from pyarrow import OSFile, ipc

    # Do not map the file into memory, for the reasons in `data.prepared`.
    with OSFile(str(path)) as file, ipc.open_stream(file) as stream:
        for batch in stream:
            for start in range(0, batch.num_rows, BATCH_ROWS):
                yield batch.slice(start, BATCH_ROWS), min(file.tell() / max(file.size(), 1), 1.0)


def _rows(batch: pyarrow.RecordBatch) -> Iterator[dict[str, Any]]:
    """Yield rows. Raises ValueError or OverflowError at a row that Python cannot represent."""
    names = batch.schema.names
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"several columns have the name {min(twice)!r}")
    try:
        yield from batch.to_pylist()
    except (ValueError, OverflowError):
        for place in range(batch.num_rows):
            yield from batch.slice(place, 1).to_pylist()


def _converted(number: int, row: dict[str, Any]) -> SourceRow:
    try:
        plain = json.dumps(_with_own_keys(row), default=_plain, ensure_ascii=False)
        return parsed(number, plain.encode())
    except TypeError as error:
        return SourceRow(number, b"", None, str(error))


def _with_own_keys(value: Any) -> Any:
    """Return a value with null in place of NaN; remove nulls from tools and tool calls.

    Arrow gives all objects of a column the same keys, and null to the keys that a row lacks. pandas
    writes NaN for a missing number.
    """
    if value != value:
        return None
    if isinstance(value, list):
        return [_without_nulls(each) if _is_tool(each) else _with_own_keys(each) for each in value]
    if is_content(value):
        return as_text(value)
    if isinstance(value, dict):
        return {
            key: _without_nulls(each) if key in CALL_KEYS else _with_own_keys(each)
            for key, each in value.items()
        }
    return value


def _is_tool(value: Any) -> bool:
    """Return whether a value has the form of a tool's JSON schema."""
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


def _plain(value: Any) -> str:
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    kind = type(value).__name__
    raise TypeError(f"holds a value of type {kind}, which has no JSON form; drop that column")
