"""A log of messages on the shared directory, with one writer. All readers see the same order.

Each message is a frame: magic, length and checksum, then a JSON object. Pipes also use frames.

0      4        8       12
| SRL1 | length | crc32 | JSON ...          integers little-endian, crc32 over length and JSON

A log consists of segment files (``name``, ``name~1``, …). Each segment begins with a frame that
holds its writer's nonce. A full segment ends with a frame that names the next segment, which
already exists. Readers never see internal frames.
"""

from __future__ import annotations

import errno
import json
import os
import struct
import uuid
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from slurmrl.errors import CorruptFileError, UsageError
from slurmrl.fsio import atomic
from slurmrl.fsio.calls import (
    NO_FILE,
    REAL,
    SystemCalls,
    corrupt,
    explain,
    opened,
    pwrite_all,
    unreadable,
)
from slurmrl.fsio.documents import COUNT, SIZE

MAGIC = b"SRL1"
HEAD = struct.Struct("<4sII")
LENGTH = struct.Struct("<I")
MESSAGE_BYTES = 64 << 20
"""Maximum length of a message in bytes. A frame with a greater length is damaged."""

Message = dict[str, Any]


def encode(message: Message) -> bytes:
    """Encode a message as a frame. Raises UsageError for a message that is too long."""
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > MESSAGE_BYTES:
        raise UsageError(f"a message of {len(body)} bytes is too long: limit {MESSAGE_BYTES}")
    return HEAD.pack(MAGIC, len(body), _checksum(body)) + body


def decode(buffer: bytes | bytearray, *, torn: bool = True) -> tuple[list[Message], int]:
    """Return the complete messages at the start of ``buffer`` and the number of bytes they take.

    Later bytes are an incomplete frame. With ``torn``, later bytes may also be garbage, because a
    file can show half a write. Without ``torn``, such bytes raise CorruptFileError. A frame with a
    correct checksum whose content is not a JSON object always raises this error.
    """
    messages: list[Message] = []
    start = 0
    while len(buffer) - start >= HEAD.size:
        magic, length, checksum = HEAD.unpack_from(buffer, start)
        plausible = magic == MAGIC and length <= MESSAGE_BYTES
        stop = start + HEAD.size + length
        if plausible and len(buffer) < stop:
            break
        body = bytes(buffer[start + HEAD.size : stop]) if plausible else b""
        if not plausible or _checksum(body) != checksum:
            if torn:
                break
            found = bytes(buffer[start : start + HEAD.size])
            raise CorruptFileError(f"{found!r} does not begin a valid frame")
        messages.append(_parse(body))
        start = stop
    return messages, start


def _checksum(body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(LENGTH.pack(len(body))))


def _parse(body: bytes) -> Message:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"a frame does not hold JSON: {error!r}") from error
    if not isinstance(message, dict):
        raise CorruptFileError(f"a frame does not hold a JSON object: {body[:80]!r}")
    return message


SEGMENT_BYTES = 64 << 20
"""Size in bytes at which a log continues in a new segment."""
CHUNK_BYTES = 1 << 20
TAIL_BYTES = 256 << 20
"""Maximum number of new bytes in one read. Usually, a writer appends less between two reads."""
LOOK_AGAIN_EVERY = 16
"""Number of reads of a missing file after which its directory is listed. An NFS client may report a
file as missing until it notices that the directory has changed."""
ANOTHER = "the next start creates a new log"
"""Advice in messages about a log that something else has replaced."""
OWN = "$log"
"""Key of the log's internal frames."""


@dataclass(frozen=True)
class LogPosition:
    """A place between two messages of a log. A later reader may begin there."""

    segment: Annotated[int, COUNT] = 0
    offset: Annotated[int, SIZE] = 0
    """Offset in bytes."""


def segment_path(path: Path, number: int) -> Path:
    """Return the path of the ``number``-th segment, counted from 0."""
    return path.with_name(f"{path.name}~{number}") if number else path


class LogWriter:
    """The only writer of a log. The constructor creates the file, which must not exist.

    To retry after an EnvironmentFailure of the constructor, pass the same ``nonce``. ``durable``
    syncs each append to disk. Raises FileExistsError, EnvironmentFailure.
    """

    def __init__(
        self,
        path: Path,
        *,
        calls: SystemCalls = REAL,
        durable: bool = False,
        nonce: str | None = None,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self._path = path
        self._calls = calls
        self._durable = durable
        self._nonce = nonce or uuid.uuid4().hex
        self._segment_bytes = segment_bytes
        self._segment = 0
        self._queued = b""
        self._offset = self._create(0)

    def append(self, *messages: Message) -> None:
        """Append messages in one write. Readers see the messages together or one after the other.

        Raises EnvironmentFailure. The messages then stay queued, since readers may have seen them
        already. The next append, even without messages, writes them first. Never append the same
        messages again. Raises CorruptFileError if something else has replaced the file; a retry
        would not help.
        """
        if any(OWN in message for message in messages):
            raise UsageError(f"a message cannot have the key {OWN!r}")
        self._queued += b"".join(encode(message) for message in messages)
        if self._offset >= self._segment_bytes:
            self._rotate()
        self._write(self._queued)
        self._offset += len(self._queued)
        self._queued = b""

    def _rotate(self) -> None:
        """Create a new segment, name it at the end of the old segment, and continue in it.

        Each step can be repeated after a failure.
        """
        start = self._create(self._segment + 1)
        self._write(encode({OWN: {"next": self._segment + 1}}))
        self._segment += 1
        self._offset = start

    def _create(self, segment: int) -> int:
        """Create a segment, or find it after a retry; return the offset of its first message."""
        path = segment_path(self._path, segment)
        head = encode({OWN: {"nonce": self._nonce}})
        if not atomic.exclusive_create(path, head, durable=self._durable, calls=self._calls):
            raise FileExistsError(errno.EEXIST, "the log exists already", str(path))
        return len(head)

    def _write(self, data: bytes) -> None:
        path = segment_path(self._path, self._segment)
        try:
            with opened(path, os.O_WRONLY | os.O_NOFOLLOW, self._calls) as descriptor:
                pwrite_all(descriptor, data, self._offset, self._calls)
                if self._durable:
                    self._calls.fsync(descriptor)
        except OSError as error:
            if (kind := NO_FILE.get(error.errno or 0)) is not None:
                raise corrupt(path, f"is {kind}, not a regular file", ANOTHER) from error
            raise explain(error, "append to", path) from error


class LogReader:
    """Follows a log.

    Each read opens the file again, because NFS clients then check for writes of other hosts.
    """

    def __init__(
        self, path: Path, *, start: LogPosition | None = None, calls: SystemCalls = REAL
    ) -> None:
        """Begin at ``start``, the `position` of an earlier reader, or at the first message."""
        self.position = start or LogPosition()
        """Place after the last message that `read` returned."""
        self._first = path
        self._calls = calls
        self._segment = self.position.segment
        self._offset = self.position.offset
        self._misses = 0
        self._messages: list[Message] = []
        """Messages that were read but not returned yet."""

    @property
    def path(self) -> Path:
        """Path of the segment that has the next message."""
        return segment_path(self._first, self._segment)

    def read(self) -> list[Message]:
        """Return the messages since the last read.

        Return no messages if the file does not exist yet, or if its handle is stale. The next read
        opens the file again.

        Raises CorruptFileError, EnvironmentFailure.
        """
        while self._read_segment():
            pass
        self.position = LogPosition(self._segment, self._offset)
        messages, self._messages = self._messages, []
        return messages

    def _read_segment(self) -> bool:
        """Read new messages of the current segment; return whether another segment follows."""
        path = self.path
        try:
            with opened(path, os.O_RDONLY | os.O_NOFOLLOW, self._calls) as descriptor:
                tail = self._read_tail(descriptor)
        except FileNotFoundError:
            self._miss()
            return False
        except OSError as error:
            if error.errno == errno.ESTALE:
                return False
            raise unreadable(error, path, ANOTHER) from error
        try:
            messages, taken = decode(tail)
        except CorruptFileError as error:
            raise CorruptFileError(f"{path}: {error}") from error
        self._offset += taken
        self._messages += [message for message in messages if OWN not in message]
        return bool(messages) and self._advance(messages[-1].get(OWN))

    def _advance(self, own: object) -> bool:
        """Move to the next segment if an internal frame names one."""
        if own is None or (isinstance(own, dict) and "nonce" in own):
            return False
        if own != {"next": self._segment + 1}:
            raise CorruptFileError(f"{self.path}: {own!r} is not a valid internal frame")
        self._segment += 1
        self._offset = self._misses = 0
        return True

    def _read_tail(self, descriptor: int) -> bytes:
        """Return the bytes after the last complete message.

        An incomplete message is read again, because its writer may have rewritten it.
        """
        chunks: list[bytes] = []
        offset = self._offset
        while chunk := self._calls.pread(descriptor, CHUNK_BYTES, offset):
            chunks.append(chunk)
            offset += len(chunk)
            if len(chunk) < CHUNK_BYTES:
                break
            if offset - self._offset > TAIL_BYTES:
                raise corrupt(self.path, f"has more than {TAIL_BYTES} bytes after its last message")
        return b"".join(chunks)

    def _miss(self) -> None:
        self._misses += 1
        if self._misses % LOOK_AGAIN_EVERY == 0:
            directory = self._first.parent
            try:
                atomic.list_names(directory, calls=self._calls)
            except FileNotFoundError as error:
                raise explain(error, "list", directory) from error
