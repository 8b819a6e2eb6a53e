"""Whole-file reads and writes on open descriptors, and temporary names."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from slurmrl.fsio.calls import SystemCalls

TEMPORARY_PREFIX = ".tmp."
FILE_MODE = 0o600
READ_BYTES = 16384
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW


@contextmanager
def opened(path: Path, flags: int, calls: SystemCalls) -> Iterator[int]:
    """Open a file and close it at the end. Errors of close are raised: NFS reports writes there."""
    descriptor = calls.open(path, flags, FILE_MODE)
    try:
        yield descriptor
    except BaseException:
        with suppress(OSError):
            calls.close(descriptor)
        raise
    calls.close(descriptor)


def read_all(descriptor: int, calls: SystemCalls, limit_bytes: int) -> bytes | None:
    """Read to the end of the file; None if that exceeds ``limit_bytes``."""
    chunks, size = [], 0
    while chunk := calls.read(descriptor, READ_BYTES):
        chunks.append(chunk)
        size += len(chunk)
        if size > limit_bytes:
            return None
    return b"".join(chunks)


def pwrite_all(descriptor: int, data: bytes | memoryview, offset: int, calls: SystemCalls) -> None:
    view = memoryview(data)
    while view:
        written = calls.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def make_private(descriptor: int, calls: SystemCalls) -> None:
    """Set mode 0600: the umask can remove bits that the owner needs."""
    if calls.mode(descriptor) != FILE_MODE:
        calls.chmod(descriptor, FILE_MODE)


def is_temporary(name: str) -> bool:
    return name.startswith(TEMPORARY_PREFIX)


def temporary_beside(path: Path) -> Path:
    """Return a new unique name in the directory of ``path``."""
    return path.parent / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"


def write_new(path: Path, data: bytes, durable: bool, calls: SystemCalls) -> None:
    """Create a file that must not exist, readable by its owner only."""
    write_new_parts(path, (data,), durable, calls)


def write_new_parts(path: Path, parts: Iterable[bytes], durable: bool, calls: SystemCalls) -> None:
    """`write_new` a file that need not fit into memory."""
    offset = 0
    with opened(path, _CREATE, calls) as descriptor:
        make_private(descriptor, calls)
        for data in parts:
            pwrite_all(descriptor, data, offset, calls)
            offset += len(data)
        if durable:
            calls.fsync(descriptor)


def discard(path: Path, calls: SystemCalls) -> None:
    """Try to remove a temporary file; one that stays is swept later."""
    with suppress(OSError):
        calls.unlink(path)
