"""A log on the shared directory: one writer, any number of readers, messages in one order."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from slurmrl.channel.frame import Message, decode, encode
from slurmrl.errors import CorruptFileError
from slurmrl.fsio import atomic
from slurmrl.fsio.calls import REAL, SystemCalls
from slurmrl.fsio.failures import explain
from slurmrl.fsio.primitives import opened, pwrite_all, write_new

CHUNK_BYTES = 1 << 20
LOOK_AGAIN_EVERY = 16
"""Reads of a missing file until its directory is listed: an NFS client can go on believing that a
file is missing until it learns that the directory has changed."""


class LogWriter:
    """Creates the file, which must not exist: a log has one writer in its life.

    ``durable`` waits for the disk at each append. Raises FileExistsError, EnvironmentFailure.
    """

    def __init__(self, path: Path, *, calls: SystemCalls = REAL, durable: bool = False) -> None:
        self._path = path
        self._calls = calls
        self._durable = durable
        self._offset = 0
        self._queued = b""
        try:
            write_new(path, b"", durable, calls)
        except FileExistsError:
            raise
        except OSError as error:
            raise explain(error, "create", path) from error

    def append(self, *messages: Message) -> None:
        """Add messages, in one write. Readers see them all at once or one after the other.

        Raises EnvironmentFailure. The messages then stay queued, since readers may have seen them
        already: the next append, if only of nothing, writes them first. Do not append them again.
        """
        self._queued += b"".join(encode(message) for message in messages)
        try:
            with opened(self._path, os.O_WRONLY | os.O_NOFOLLOW, self._calls) as descriptor:
                pwrite_all(descriptor, self._queued, self._offset, self._calls)
                if self._durable:
                    self._calls.fsync(descriptor)
        except OSError as error:
            raise explain(error, "append to", self._path) from error
        self._offset += len(self._queued)
        self._queued = b""


class LogReader:
    """Follows a log. The file is opened anew at each read: that is when NFS clients look for what
    others have written."""

    def __init__(self, path: Path, *, calls: SystemCalls = REAL) -> None:
        self._path = path
        self._calls = calls
        self._offset = 0
        self._misses = 0

    def read(self) -> list[Message]:
        """The messages since the last read; none if the file is not there yet, or its handle is
        stale (the next read gets a new one).

        Raises CorruptFileError, EnvironmentFailure.
        """
        try:
            with opened(self._path, os.O_RDONLY | os.O_NOFOLLOW, self._calls) as descriptor:
                tail = self._read_tail(descriptor)
        except FileNotFoundError:
            self._miss()
            return []
        except OSError as error:
            if error.errno == errno.ESTALE:
                return []
            raise explain(error, "read", self._path) from error
        try:
            messages, taken = decode(tail)
        except CorruptFileError as error:
            raise CorruptFileError(f"{self._path}: {error}") from error
        self._offset += taken
        return messages

    def _read_tail(self, descriptor: int) -> bytes:
        """From the end of the last message on: an incomplete one is read again, since its writer
        may have begun it anew."""
        chunks: list[bytes] = []
        offset = self._offset
        while chunk := self._calls.pread(descriptor, CHUNK_BYTES, offset):
            chunks.append(chunk)
            offset += len(chunk)
            if len(chunk) < CHUNK_BYTES:
                break
        return b"".join(chunks)

    def _miss(self) -> None:
        self._misses += 1
        if self._misses % LOOK_AGAIN_EVERY == 0:
            try:
                atomic.list_names(self._path.parent, calls=self._calls)
            except FileNotFoundError as error:
                raise explain(error, "list", self._path.parent) from error
