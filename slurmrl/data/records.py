"""A JSONL file: one object per line, each with a unique id. Torch-free."""

from __future__ import annotations

import json
import os
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from slurmrl.data.text import wrong_text
from slurmrl.errors import ConfigError, EnvironmentFailure, Problem

MOST_PROBLEMS = 20
"""Maximum number of problems to report for a file."""
READ_BYTES = 1 << 20
SETTLED_NS = 2_000_000_000
"""File systems keep times with a resolution of up to two seconds."""
LINE_BYTES = 256 << 20
"""Longest line that is parsed."""


class NumberedRow(NamedTuple):
    line: int
    """Line number, from 1."""
    raw: bytes
    """The line as it is in the file, without white space around it."""
    row: dict[str, Any]


class RecordReader:
    """Reads the rows of a file one by one. It keeps eight bytes of each, to find ids that occur
    twice. Blank lines are skipped.

    Iterate over it to the end, then call `finish`.

    :raises EnvironmentFailure: the file cannot be read.
    """

    def __init__(self, path: Path, id_key: str, *, most_bytes: int | None = None) -> None:
        """``most_bytes``: read only the complete lines in that many bytes from the start."""
        self.size = 0
        """Bytes of the file."""
        self.done = 0
        """Bytes that have been read."""
        self.rows = 0
        self.state = ""
        """See `source_state`."""
        self._path = path
        self._most_bytes = most_bytes
        self._digest = blake2b(digest_size=16)
        self._ids = _Ids(path, id_key)
        self._problems: list[Problem] = []

    @property
    def whole(self) -> bool:
        """Whether the file was read to its end."""
        return self.done >= self.size

    @property
    def fingerprint(self) -> str:
        """Changes with the bytes that were read."""
        return self._digest.hexdigest()

    def __iter__(self) -> Iterator[NumberedRow]:
        """Yield the rows; `finish` reports lines that are not rows.

        :raises ConfigError: there are `MOST_PROBLEMS` such lines.
        """
        for number, line in enumerate(self._lines(), start=1):
            row = self._parse(number, line)
            if row is not None:
                self.rows += 1
                self._ids.add(number, row)
                yield NumberedRow(number, line.strip(), row)

    def finish(self) -> None:
        """Check the file as a whole.

        :raises ConfigError: lines that are not JSON objects, missing or duplicate ids, an empty
            file; each problem names its line.
        """
        if not self.rows and not self._problems:
            self._problems.append(Problem(str(self._path), "", "the file holds no rows"))
        problems = [*self._problems, *self._ids.problems()]
        if problems:
            raise ConfigError(tuple(problems[:MOST_PROBLEMS]))

    def _lines(self) -> Iterator[bytes]:
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                self.size, self.state = found.st_size, _state(found)
                most = self._most_bytes if self._most_bytes is not None else self.size
                limited = most < self.size
                while line := file.readline(LINE_BYTES + 1):
                    if limited and self.done + len(line) > most:
                        return
                    self.done += len(line)
                    self._digest.update(line)
                    yield line
                self.size = self.done  # it may have grown
        except OSError as error:
            raise _unreadable(self._path, error) from error

    def _parse(self, number: int, line: bytes) -> dict[str, Any] | None:
        if not line.strip():
            return None
        if len(line) > LINE_BYTES:
            message = f"the line is longer than {LINE_BYTES >> 20} MiB; a row is one line"
            raise ConfigError((Problem(f"{self._path}:{number}", "", message),))
        message = "must be a JSON object"
        try:
            row = json.loads(line)
            if isinstance(row, dict):
                return row
        except RecursionError:
            message = "not JSON: nested too deeply"
        except ValueError as error:
            message = f"not JSON: {error}"
        self._problems.append(Problem(f"{self._path}:{number}", "", message))
        if len(self._problems) == MOST_PROBLEMS:
            raise ConfigError(tuple(self._problems))
        return None


@dataclass(frozen=True)
class Records:
    """All rows of a file in memory. ``ids[i]`` names ``rows[i]``."""

    rows: tuple[dict[str, Any], ...]
    ids: tuple[str, ...]
    lines: tuple[int, ...]
    """The row's line number, from 1."""
    whole: bool = True
    """Whether the file was read to its end."""


def read_records(path: Path, id_key: str, *, most_bytes: int | None = None) -> Records:
    """Read all rows, or the complete lines in the first ``most_bytes``.

    :raises ConfigError: see `RecordReader.finish`.
    :raises EnvironmentFailure: the file cannot be read.
    """
    reader = RecordReader(path, id_key, most_bytes=most_bytes)
    numbered = [(record.line, record.row) for record in reader]
    reader.finish()
    return Records(
        tuple(row for _, row in numbered),
        tuple(id_of(row, id_key, line) for line, row in numbered),
        tuple(line for line, _ in numbered),
        reader.whole,
    )


def source_fingerprint(path: Path, progress: Callable[[float], None]) -> str:
    """`RecordReader.fingerprint` of a whole file; ``progress`` receives the share that has been
    read. Raises EnvironmentFailure."""
    digest = blake2b(digest_size=16)
    done = 0
    try:
        with path.open("rb") as file:
            size = max(os.fstat(file.fileno()).st_size, 1)
            while part := file.read(READ_BYTES):
                digest.update(part)
                done += len(part)
                progress(done / size)
    except OSError as error:
        raise _unreadable(path, error) from error
    return digest.hexdigest()


def source_state(path: Path) -> str:
    """The size and times of a file, which change with its content; "" if it was changed so recently
    that the next change could leave them as they are. Raises EnvironmentFailure."""
    try:
        return _state(path.stat())
    except OSError as error:
        raise _unreadable(path, error) from error


def _state(found: os.stat_result) -> str:
    if found.st_ctime_ns > time.time_ns() - SETTLED_NS:
        return ""
    return f"{found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}"


def _unreadable(path: Path, error: OSError) -> EnvironmentFailure:
    return EnvironmentFailure(f"cannot read dataset {path}: {error.strerror or error}")


def id_of(row: Mapping[str, Any], id_key: str, line: int) -> str:
    """A row's id; in a file without ids, the line number."""
    return str(row[id_key]) if id_key in row else str(line)


class _Ids:
    """The ids of a file: all rows have one, or none. Names are kept as hashes."""

    def __init__(self, path: Path, key: str) -> None:
        self._path = path
        self._key = key
        self._named = False
        """Whether any row has the key."""
        self._hashes = array("q")
        self._missing: list[int] = []
        self._wrong: list[tuple[int, str]] = []
        """The first lines without an id, and those with a value that is none."""

    def add(self, line: int, row: Mapping[str, Any]) -> None:
        self._named = self._named or self._key in row
        name = row.get(self._key)
        if name is None:
            if len(self._missing) < MOST_PROBLEMS:
                self._missing.append(line)
            return
        message = _wrong_id(name)
        if not message:
            self._hashes.append(hash(str(name)))
        elif len(self._wrong) < MOST_PROBLEMS:
            self._wrong.append((line, message))

    def problems(self) -> list[Problem]:
        """The first ones, in the order of lines."""
        if not self._named:
            return []
        missing = [(line, "missing here, though other lines have it") for line in self._missing]
        twice = islice(self._duplicates(), MOST_PROBLEMS)
        return [
            Problem(f"{self._path}:{line}", self._key, message)
            for line, message in sorted([*self._wrong, *missing, *twice])
        ]

    def _duplicates(self) -> Iterator[tuple[int, str]]:
        """Read the file again for the names of hashes that occur more than once."""
        hashes, counts = np.unique(np.frombuffer(self._hashes, np.int64), return_counts=True)
        often = frozenset(hashes[counts > 1].tolist())
        first: dict[str, int] = {}
        for record in RecordReader(self._path, self._key) if often else ():
            name = str(record.row.get(self._key))
            if hash(name) in often and first.setdefault(name, record.line) != record.line:
                yield record.line, f"'{name}' is already the id of line {first[name]}"


def _wrong_id(value: Any) -> str:
    """Why a value is not an id; "" if it is."""
    if isinstance(value, str):
        return wrong_text(value)
    whole = isinstance(value, int) and not isinstance(value, bool)
    return "" if whole else "must be a string or a whole number"
