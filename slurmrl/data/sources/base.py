"""What all files of rows have in common. Torch-free."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from slurmrl.errors import EnvironmentFailure

READ_BYTES = 1 << 20
ROW_BYTES = 256 << 20
"""Longest row that is parsed."""
SETTLED_NS = 2_000_000_000
"""File systems keep times with a resolution of up to two seconds."""
NOT_AN_OBJECT = "must be a JSON object"


class SourceRow(NamedTuple):
    number: int
    """Its line in a JSONL file; its place in other files. From 1."""
    raw: bytes
    """The row as JSON."""
    row: dict[str, Any] | None
    """None if it is not a JSON object."""
    problem: str
    """Why it is not."""


class RowSource(ABC):
    """Reads rows one by one, once, in the order of the files."""

    def __init__(self, path: Path, files: Sequence[Path], most_bytes: int | None = None) -> None:
        self.path = path
        self.files = tuple(files)
        self.size = 0
        """Bytes of the files."""
        self.done = 0
        """Bytes that have been read, about."""
        self.whole = True
        """False once rows were left out because of ``most_bytes``."""
        self.state = ""
        """`state_of` the files when they were opened."""
        self._most_bytes = most_bytes

    @abstractmethod
    def rows(self) -> Generator[SourceRow]:
        """Yield the rows.

        :raises ConfigError: the rest of the file cannot be understood.
        :raises EnvironmentFailure: a file cannot be read.
        """

    @abstractmethod
    def fingerprint(self) -> str:
        """`fingerprint_of` the files; for a file that was read in part, of that part."""

    @abstractmethod
    def where(self, number: int) -> str:
        """The place of a row that was read, for people: ``rows.jsonl:3``."""


def fingerprint_of(files: Sequence[Path], progress: Callable[[float], None]) -> str:
    """Changes with the bytes of the files and their number; ``progress`` receives the share that
    has been read. Raises EnvironmentFailure."""
    digest = blake2b(digest_size=16)
    done, path = 0, files[0]
    try:
        size = max(sum(path.stat().st_size for path in files), 1)
        for path in files:
            if len(files) > 1:
                digest.update(f"{path.name} {path.stat().st_size} ".encode())
            with path.open("rb") as file:
                while part := file.read(READ_BYTES):
                    digest.update(part)
                    done += len(part)
                    progress(done / size)
    except OSError as error:
        raise unreadable(path, error) from error
    return digest.hexdigest()


def state_of(files: Sequence[Path]) -> str:
    """The sizes and times of files, which change with their content; "" if one was changed so
    recently that the next change could leave them as they are. Raises EnvironmentFailure."""
    states = []
    for path in files:
        try:
            states.append(state_of_one(path.stat()))
        except OSError as error:
            raise unreadable(path, error) from error
    return " ".join(states) if all(states) else ""


def state_of_one(status: os.stat_result) -> str:
    if status.st_ctime_ns > time.time_ns() - SETTLED_NS:
        return ""
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def unreadable(path: Path, error: OSError) -> EnvironmentFailure:
    return EnvironmentFailure(f"cannot read dataset {path}: {error.strerror or error}")
