"""Prepared data: the tokenized rows of a dataset, in files of the run directory. Torch-free.

Contents of a directory, with little-endian numbers:

- ``rows.bin``: row after row, the token ids of all sequences (uint16 or uint32), for each sequence
  the number of its runs and their lengths (uint32, see `TokenSequence`), the id (UTF-8), in a
  dataset with images the content key of its pictures (`KEY_BYTES`, zeros for none), and other
  fields of the row for samples (JSON, see `RowType.stored`);
- ``pictures/``: the pictures of a dataset with images (`tensors.pictures`);
- ``images.json``: the files from which the pictures were made (`image_sources`);
- ``index.bin``: an `Entry` of seven int64 and a float64 for each row, and one entry for the end;
- ``manifest.json``: written last. Without the manifest, the directory does not count.

Rows are read with pread, not through a memory mapping. While a network file system does not answer,
a page fault would hold the interpreter lock, so the rank would count as hung. If the server has
lost a page, the fault would kill the process. Processes of a host share the page cache either way.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slurmrl.data.encoder import RowTokens
from slurmrl.errors import CorruptFileError
from slurmrl.fsio import atomic, documents
from slurmrl.fsio.calls import (
    REAL,
    SystemCalls,
    corrupt,
    discard,
    explain,
    make_private,
    unreadable,
)
from slurmrl.fsio.documents import INTEGER, SIZE, FieldType
from slurmrl.tensors.pictures import KEY_BYTES, MANIFEST, NONE, path_of

VERSION: Final = 6
ROWS, INDEX = "rows.bin", "index.bin"
BUFFER_BYTES: Final = 1 << 20
INDEX_ROWS: Final = 1 << 14
"""Number of index entries that are read together."""
REMEDY: Final = "the next incarnation makes it again"
TOKEN_BYTES: Final = FieldType("2 or 4", lambda value: type(value) is int and value in (2, 4))
_ENTRY: Final = struct.Struct("<6qdq")
_CHECKED: Final = struct.Struct("<7qd")
_RUN: Final = np.dtype("<u4")


class Entry(NamedTuple):
    """Place of a row in ``rows.bin``, and the sizes of its parts."""

    start: int
    """Offset of the row's first byte; the row ends where the next row starts."""
    tokens: int
    """Number of tokens."""
    runs: int
    """Size of the runs in bytes."""
    name: int
    """Size of the id in bytes."""
    line: int
    """Number of the row in the user's file (`NumberedRow.number`)."""
    row_check: int
    """CRC-32 of the row's bytes."""
    difficulty: float
    """The row's value of ``curriculum_key``; 0 without a curriculum."""
    check: int
    """CRC-32 of the row's number and the preceding fields of this entry."""

    @staticmethod
    def make(number: int, *fields: float) -> Entry:
        return Entry._make((*fields, zlib.crc32(_CHECKED.pack(number, *fields))))


@dataclass(frozen=True)
class PreparedManifest:
    recipe: str
    """Fingerprint of the settings and the tokenizer."""
    source: str
    """Fingerprint of the user's file, and of its images (`Sources`)."""
    source_state: str
    """Sizes and times of the user's files when they were read."""
    rows: Annotated[int, SIZE]
    left_out: Annotated[int, SIZE]
    """Number of rows that exceed the length limits."""
    token_bytes: Annotated[int, TOKEN_BYTES]
    row_bytes: Annotated[int, SIZE]
    """Size of ``rows.bin`` in bytes."""
    pictures: bool
    """Whether rows may have pictures."""
    tokens: str
    """Fingerprint of the tokens of all rows, and of their runs."""


def read_manifest(directory: Path, *, calls: SystemCalls = REAL) -> PreparedManifest | None:
    """Return the manifest; None if the directory is unfinished or from another format version.

    Raises CorruptFileError, EnvironmentFailure.
    """
    path = directory / MANIFEST
    try:
        values = documents.read(path, {"version": INTEGER}, ("version",), calls=calls)
    except FileNotFoundError:
        return None
    if values["version"] != VERSION:
        return None
    return documents.from_json(PreparedManifest, values, path, remedy=REMEDY)


class PreparedRow(NamedTuple):
    name: str
    line: int
    tokens: NDArray[np.int64]
    """Tokens of all sequences."""
    runs: list[list[int]]
    """The runs of each sequence (`TokenSequence`)."""
    row: dict[str, Any]
    """The fields of the row that samples need (`RowType.stored`)."""
    pictures: str | None
    """The path of its pictures, or `tensors.pictures.NONE`; None in a dataset without images."""


class PreparedRows:
    """Reads single rows and verifies their checksums, so that damage cannot change a row silently.

    Raises CorruptFileError if a file is missing or damaged, EnvironmentFailure if it cannot be
    read. Damage removes the manifest, so that the next incarnation prepares the data again.
    """

    def __init__(self, directory: Path, *, calls: SystemCalls = REAL) -> None:
        manifest = read_manifest(directory, calls=calls)
        if manifest is None:
            raise corrupt(directory / MANIFEST, "is missing", REMEDY)
        self.manifest = manifest
        self._directory = directory
        self._calls = calls
        self._dtype = np.dtype(f"<u{manifest.token_bytes}")
        self._files: dict[str, int] = {}
        try:
            self._open(ROWS, manifest.row_bytes)
            self._open(INDEX, (manifest.rows + 1) * _ENTRY.size)
        except BaseException:
            self.close()
            raise

    @property
    def name(self) -> str:
        """The name of the directory."""
        return self._directory.name

    def close(self) -> None:
        for descriptor in self._files.values():
            self._calls.close(descriptor)
        self._files.clear()

    def __len__(self) -> int:
        return self.manifest.rows

    def describe(self, index: int) -> tuple[str, list[int]]:
        """Return the id of a row and the lengths of its sequences, without reading their tokens."""
        entry, _ = self._entries(index)
        start = entry.start + entry.tokens * self._dtype.itemsize
        content = self._read(ROWS, start, entry.runs + entry.name)
        runs = self._runs(index, content[: entry.runs], entry.tokens)
        return self._decoded(index, content[entry.runs :]), [sum(each) for each in runs]

    def entries(self) -> Iterator[Entry]:
        """Yield the entries of all rows, in order."""
        for start in range(0, len(self), INDEX_ROWS):
            count = min(INDEX_ROWS, len(self) - start)
            data = self._read(INDEX, start * _ENTRY.size, count * _ENTRY.size)
            for number, fields in enumerate(_ENTRY.iter_unpack(data), start=start):
                yield self._checked(number, Entry._make(fields))

    def read(self, index: int) -> PreparedRow:
        entry, end = self._entries(index)
        content = self._read(ROWS, entry.start, end.start - entry.start)
        if zlib.crc32(content) != entry.row_check:
            raise self._damaged(ROWS, index)
        name = entry.tokens * self._dtype.itemsize + entry.runs
        row = name + entry.name
        tokens = np.frombuffer(content, self._dtype, entry.tokens).astype(np.int64)
        runs = self._runs(index, content[name - entry.runs : name], entry.tokens)
        label, pictures = self._decoded(index, content[name:row]), None
        if self.manifest.pictures:
            key, row = content[row : row + KEY_BYTES], row + KEY_BYTES
            pictures = str(path_of(self._directory, key)) if any(key) else NONE
        values = json.loads(content[row:]) if content[row:] else {}
        return PreparedRow(label, entry.line, tokens, runs, values, pictures)

    def _open(self, name: str, size: int) -> None:
        path = self._directory / name
        try:
            descriptor = self._calls.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError as error:
            raise self._corrupt(name, "is missing") from error
        except OSError as error:
            raise unreadable(error, path, REMEDY) from error
        self._files[name] = descriptor
        actual = os.fstat(descriptor).st_size
        if actual != size:
            raise self._corrupt(name, f"has {actual} bytes instead of {size}")

    def _entries(self, index: int) -> tuple[Entry, Entry]:
        """Return the entries of a row and of the next row."""
        data = self._read(INDEX, index * _ENTRY.size, 2 * _ENTRY.size)
        entry, end = map(Entry._make, _ENTRY.iter_unpack(data))
        return self._checked(index, entry), self._checked(index + 1, end)

    def _checked(self, number: int, entry: Entry) -> Entry:
        if entry != Entry.make(number, *entry[:-1]):
            raise self._damaged(INDEX, number)
        return entry

    def _read(self, name: str, start: int, count: int) -> bytes:
        parts, left = [], count
        try:
            while left and (part := self._calls.pread(self._files[name], left, start)):
                parts.append(part)
                start, left = start + len(part), left - len(part)
        except OSError as error:
            raise explain(error, "read", self._directory / name) from error
        if left:
            raise self._corrupt(name, "ends before its last row")
        return b"".join(parts)

    def _runs(self, index: int, content: bytes, tokens: int) -> list[list[int]]:
        """Return the lengths of each sequence's runs."""
        numbers = np.frombuffer(content, _RUN).tolist()
        runs = []
        at = 0
        while at < len(numbers):
            runs.append(numbers[at + 1 : at + 1 + numbers[at]])
            at += 1 + numbers[at]
        if at != len(numbers) or sum(map(sum, runs)) != tokens:
            raise self._damaged(ROWS, index)
        return runs

    def _decoded(self, index: int, name: bytes) -> str:
        try:
            return name.decode()
        except UnicodeDecodeError as error:
            raise self._damaged(ROWS, index) from error

    def _damaged(self, name: str, index: int) -> CorruptFileError:
        return self._corrupt(name, f"is damaged at row {index}")

    def _corrupt(self, name: str, what: str) -> CorruptFileError:
        discard(self._directory / MANIFEST, self._calls)
        return corrupt(self._directory / name, what, REMEDY)


class PreparedWriter:
    """Writes rows into a directory of this process. The rows count only after `publish`.

    Raises EnvironmentFailure.
    """

    def __init__(
        self,
        directory: Path,
        token_bytes: int,
        *,
        pictures: bool = False,
        calls: SystemCalls = REAL,
    ) -> None:
        self._directory, self._pictures, self._calls = directory, pictures, calls
        self._dtype = np.dtype(f"<u{token_bytes}")
        self._number, self._tokens = 0, blake2b(digest_size=16)
        atomic.make_private_directory(directory, calls=calls)
        self._rows = _Output(directory / ROWS, calls)
        self._index = _Output(directory / INDEX, calls)

    def add(
        self, tokens: RowTokens, name: str, line: int, row: bytes, difficulty: float = 0.0
    ) -> None:
        ids = np.array([id for sequence in tokens for id in sequence.tokens], self._dtype)
        runs = [number for each in tokens for number in (len(each.runs), *each.runs)]
        packed = np.array(runs, _RUN).tobytes()
        self._tokens.update(ids.astype("<u4").tobytes() + packed)
        encoded = name.encode(errors="surrogatepass")  # `RecordReader.finish` rejects surrogates
        key = tokens[0].pictures.ljust(KEY_BYTES, b"\0") if self._pictures else b""
        content = b"".join((ids.tobytes(), packed, encoded, key, row))
        entry = (len(ids), len(packed), len(encoded), line, zlib.crc32(content), difficulty)
        self._add_entry(self._rows.size, *entry)
        self._rows.write(content)

    def publish(self, recipe: str, source: str, source_state: str, left_out: int) -> None:
        """Write the rows, and then the manifest, durably to disk."""
        made = (self._number, left_out, self._dtype.itemsize, self._rows.size, self._pictures)
        tokens = self._tokens.hexdigest()
        manifest = PreparedManifest(recipe, source, source_state, *made, tokens)
        self._add_entry(self._rows.size, 0, 0, 0, 0, 0, 0.0)
        self._rows.finish()
        self._index.finish()
        text = json.dumps({"version": VERSION, **documents.to_json(manifest)}, indent=1) + "\n"
        atomic.replace(self._directory / MANIFEST, text.encode(), calls=self._calls)

    def close(self) -> None:
        self._rows.close()
        self._index.close()

    def _add_entry(self, *fields: float) -> None:
        self._index.write(_ENTRY.pack(*Entry.make(self._number, *fields)))
        self._number += 1


class _Output:
    """A file that is written from its start to its end."""

    def __init__(self, path: Path, calls: SystemCalls) -> None:
        self.size = 0
        self._path = path
        self._calls = calls
        self._buffer = bytearray()
        self._descriptor: int | None = None
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
            self._descriptor = calls.open(path, flags)
            make_private(self._descriptor, calls)
        except OSError as error:
            self.close()
            raise explain(error, "make", path) from error

    def write(self, data: bytes) -> None:
        self.size += len(data)
        self._buffer += data
        if len(self._buffer) >= BUFFER_BYTES:
            self._flush()

    def finish(self) -> None:
        """Write everything to disk and close the file."""
        self._flush()
        assert self._descriptor is not None
        try:
            self._calls.fsync(self._descriptor)
            descriptor, self._descriptor = self._descriptor, None
            self._calls.close(descriptor)
        except OSError as error:
            raise explain(error, "write", self._path) from error

    def close(self) -> None:
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            with suppress(OSError):
                self._calls.close(descriptor)

    def _flush(self) -> None:
        assert self._descriptor is not None
        left = memoryview(bytes(self._buffer))
        self._buffer.clear()
        try:
            while left:
                left = left[self._calls.write(self._descriptor, left) :]
        except OSError as error:
            raise explain(error, "write", self._path) from error
