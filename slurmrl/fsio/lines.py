"""Line files (metrics, samples, events, logs): reading in chunks from either end, and appending.

A last line without a line end is incomplete and is not returned. Overlong lines are skipped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slurmrl.errors import EnvironmentFailure
from slurmrl.fsio import atomic
from slurmrl.fsio.calls import MOVE_AWAY, REAL, SystemCalls, unreadable
from slurmrl.fsio.calls import opened as opened_file

FIRST_BYTES = 64 << 10
"""Size of the first chunk read from the end; it often suffices."""
CHUNK_BYTES = 1 << 20
LINE_BYTES = 8 << 20


class LineFile:
    """An open file; ``size`` is its size when it was opened."""

    def __init__(self, descriptor: int, calls: SystemCalls) -> None:
        self.size = os.fstat(descriptor).st_size
        self.offset = 0
        """Start of the first line that `forward` has not yielded."""
        self._descriptor = descriptor
        self._calls = calls

    def forward(
        self, start: int = 0, stop: int | None = None, *, torn: bool = False
    ) -> Iterator[bytes]:
        """Yield the complete lines between two offsets.

        ``torn`` also yields an incomplete last line and the parts of overlong lines.
        """
        stop = self.size if stop is None else min(stop, self.size)
        self.offset = start
        rest, skip = b"", False
        while start < stop and (data := self._read(start, min(stop - start, CHUNK_BYTES))):
            start += len(data)
            *whole, rest = (rest + data).split(b"\n")
            if whole:
                yield from whole[skip:]
                skip = False
            self.offset = start - len(rest)
            if skip or len(rest) > LINE_BYTES or (torn and start == stop and rest):
                if torn:
                    yield rest
                rest, skip, self.offset = b"", not torn, start

    def first(self, count: int) -> bytes:
        """Return up to ``count`` bytes from the start."""
        return self._read(0, min(count, self.size))

    def backward(self, stop: int = 0) -> Iterator[tuple[int, bytes]]:
        """Yield the complete lines from the last one back to the offset ``stop``.

        Each item is the offset at which a line begins, and the line.
        """
        start, rest, chunk = self.size, b"", min(FIRST_BYTES, CHUNK_BYTES)
        skip = True  # text after the last line end: an incomplete line
        while start > stop:
            end = start + len(rest)
            start = max(stop, start - chunk)
            chunk = min(2 * chunk, CHUNK_BYTES)
            rest, *whole = (self._read(start, end - start - len(rest)) + rest).split(b"\n")
            for line in reversed(whole):
                end -= len(line)
                if not skip:
                    yield end, line
                skip = False
                end -= 1
            if skip or len(rest) > LINE_BYTES:
                rest, skip = b"", True
        if stop == 0 and not skip:
            yield 0, rest

    def _read(self, offset: int, count: int) -> bytes:
        return self._calls.pread(self._descriptor, count, offset)


class LineWriter:
    """A writer that appends to a file that no other process writes.

    It closes the file after each write, so that other hosts see the lines.
    """

    def __init__(self, path: Path, *, calls: SystemCalls = REAL) -> None:
        self.path = path
        self.size = 0
        """Size of the file after the last write."""
        self._calls = calls
        self._torn = False
        """Whether the last write failed, perhaps in the middle of a line."""

    def write(self, data: bytes) -> int:
        """Append lines and return the offset at which they begin.

        Raises EnvironmentFailure; the write can be retried.
        """
        ended = b"\n" if self._torn else b""
        self._torn = True
        start = atomic.append(self.path, ended + data, calls=self._calls) + len(ended)
        self._torn = False
        self.size = start + len(data)
        return start


@contextmanager
def opened(path: Path, *, calls: SystemCalls = REAL) -> Iterator[LineFile]:
    """Open a line file.

    Raises FileNotFoundError, CorruptFileError if it is not a regular file, EnvironmentFailure.
    """
    try:
        with opened_file(path, os.O_RDONLY, calls) as descriptor:
            yield LineFile(descriptor, calls)
    except (FileNotFoundError, EnvironmentFailure):
        raise
    except OSError as error:
        raise unreadable(error, path, MOVE_AWAY) from error
