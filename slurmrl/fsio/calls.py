"""Access to the file system: one thin method per operation, and functions for whole files.

All access to the shared directory goes through a `SystemCalls`, so that tests can replace it with
layers that record, fail, delay or show a stale view. The module also makes the exceptions, with
messages, for errors of the operating system.
"""

from __future__ import annotations

import errno
import os
import stat
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from slurmrl.errors import CorruptFileError, EnvironmentFailure

LOCAL_MAGIC = frozenset(
    {
        0xEF53,  # ext2, ext3, ext4
        0x58465342,  # xfs
        0x9123683E,  # btrfs
        0x01021994,  # tmpfs
        0x858458F6,  # ramfs
        0x794C7630,  # overlayfs
        0x2FC12FC1,  # zfs
        0xF2F52010,  # f2fs
        0xCA451A4E,  # bcachefs
    }
)
"""File system types (statfs(2)) on which the kernel sees every change. All other types count as
shared, such as NFS, Lustre, GPFS, BeeGFS, CephFS, FUSE, SMB and unknown types."""

_STRUCT_BYTES = 512
"""Size of a buffer for any struct statfs; its first field is a long, the type."""


def is_local(directory: Path) -> bool:
    """Return whether a directory is on a local file system; False if its type is unknown."""
    import ctypes  # ctypes is slow to import, and few commands need it.

    buffer = (ctypes.c_long * (_STRUCT_BYTES // ctypes.sizeof(ctypes.c_long)))()
    library = ctypes.CDLL(None, use_errno=True)
    if library.statfs(os.fsencode(directory), ctypes.byref(buffer)) != 0:
        return False
    return (buffer[0] & 0xFFFFFFFF) in LOCAL_MAGIC


class SystemCalls:
    """The real file system operations. All methods raise the OSErrors of the operating system."""

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        """Open a regular file.

        Raises EISDIR for a directory, ENXIO for a FIFO, a socket or a device, without blocking on a
        FIFO.
        """
        descriptor = os.open(path, flags | os.O_NONBLOCK, mode)
        kind = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(kind):
            os.close(descriptor)
            number = errno.EISDIR if stat.S_ISDIR(kind) else errno.ENXIO
            raise OSError(number, os.strerror(number), str(path))
        return descriptor

    def caches(self, directory: Path) -> bool:
        """Return whether this machine may see a stale directory; False on a local file system."""
        return not is_local(directory)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def read(self, descriptor: int, count: int) -> bytes:
        return os.read(descriptor, count)

    def pread(self, descriptor: int, count: int, offset: int) -> bytes:
        return os.pread(descriptor, count, offset)

    def write(self, descriptor: int, data: bytes | memoryview) -> int:
        return os.write(descriptor, data)

    def pwrite(self, descriptor: int, data: bytes | memoryview, offset: int) -> int:
        return os.pwrite(descriptor, data, offset)

    def truncate(self, descriptor: int, size: int) -> None:
        os.ftruncate(descriptor, size)

    def fsync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def mode(self, descriptor: int) -> int:
        """Return the permission bits of an open file."""
        return os.fstat(descriptor).st_mode & 0o777

    def chmod(self, target: int | Path, mode: int) -> None:
        os.chmod(target, mode)

    def stat(self, path: Path) -> os.stat_result:
        return os.stat(path)

    def lstat(self, path: Path) -> os.stat_result:
        return os.lstat(path)

    def link(self, source: Path, target: Path) -> None:
        os.link(source, target)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def listdir(self, directory: Path) -> Iterable[str]:
        return os.listdir(directory)

    def mkdir(self, path: Path, mode: int = 0o700) -> None:
        os.mkdir(path, mode)

    def fsync_directory(self, directory: Path) -> None:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def sleep(self, seconds: float) -> None:
        """Pause before a retry."""
        time.sleep(seconds)


REAL = SystemCalls()
"""System calls that all functions of this package use by default; the object has no state."""


TEMPORARY_PREFIX = ".tmp."
FILE_MODE = 0o600
READ_BYTES = 16384
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW


@contextmanager
def opened(path: Path, flags: int, calls: SystemCalls) -> Iterator[int]:
    """Open a file and close it at the end.

    Raises OSError even from closing, because NFS may report a failed write only then.
    """
    descriptor = calls.open(path, flags, FILE_MODE)
    try:
        yield descriptor
    except BaseException:
        with suppress(OSError):
            calls.close(descriptor)
        raise
    calls.close(descriptor)


def read_all(descriptor: int, calls: SystemCalls, limit_bytes: int) -> bytes | None:
    """Return the content up to the end of the file; None if it exceeds ``limit_bytes``."""
    chunks, size = [], 0
    while chunk := calls.read(descriptor, READ_BYTES):
        chunks.append(chunk)
        size += len(chunk)
        if size > limit_bytes:
            return None
    return b"".join(chunks)


def write_all(descriptor: int, data: bytes | memoryview, calls: SystemCalls) -> None:
    view = memoryview(data)
    while view:
        view = view[calls.write(descriptor, view) :]


def pwrite_all(descriptor: int, data: bytes | memoryview, offset: int, calls: SystemCalls) -> None:
    view = memoryview(data)
    while view:
        written = calls.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def make_private(descriptor: int, calls: SystemCalls) -> None:
    """Set mode 0600. The umask may have removed bits that the owner needs."""
    if calls.mode(descriptor) != FILE_MODE:
        calls.chmod(descriptor, FILE_MODE)


def is_temporary(name: str) -> bool:
    return name.startswith(TEMPORARY_PREFIX)


def temporary_beside(path: Path) -> Path:
    """Return a new unique name in the directory of ``path``."""
    return path.parent / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"


def write_new(path: Path, data: bytes, durable: bool, calls: SystemCalls) -> None:
    """Create a file that must not exist yet, readable by its owner only."""
    write_new_parts(path, (data,), durable, calls)


def write_new_parts(path: Path, parts: Iterable[bytes], durable: bool, calls: SystemCalls) -> None:
    """Create a file as `write_new` does, from parts that together need not fit into memory."""
    offset = 0
    with opened(path, _CREATE, calls) as descriptor:
        make_private(descriptor, calls)
        for data in parts:
            pwrite_all(descriptor, data, offset, calls)
            offset += len(data)
        if durable:
            calls.fsync(descriptor)


def discard(path: Path, calls: SystemCalls) -> None:
    """Try to remove a temporary file; else `sweep_temporaries` removes the file later."""
    with suppress(OSError):
        calls.unlink(path)


PRIVATE_UMASK = 0o077


def set_private_umask() -> None:
    """Set a private umask for this process and its children, because libraries create files too."""
    os.umask(PRIVATE_UMASK)


LEAST_BYTES = 64 << 20
"""Minimum free space for starting a run, which writes logs and events at its start."""
PROBE_BYTES = 1 << 20


def free_bytes(directory: Path) -> int | None:
    """Return the free space for users as statvfs reports it (without quotas); None if unknown."""
    with suppress(OSError):
        found = os.statvfs(directory)
        return found.f_bavail * found.f_frsize
    return None


def require_space(directory: Path, *, calls: SystemCalls = REAL) -> None:
    """Raise EnvironmentFailure if a directory lacks the space for starting a run.

    The directory may be missing. If it exists, write a probe file, because only a write reveals an
    exhausted quota.
    """
    existing = next(path for path in (directory, *directory.parents) if path.is_dir())
    free = free_bytes(existing)
    if free is not None and free < LEAST_BYTES:
        raise EnvironmentFailure(
            f"the file system of {existing} is full: {free >> 20} MiB are free, but a run needs at "
            f"least {LEAST_BYTES >> 20} MiB to start, and space for its checkpoints; nothing was "
            "submitted"
        )
    if existing != directory:
        return
    probe = temporary_beside(directory / "probe")
    try:
        write_new(probe, os.urandom(PROBE_BYTES), True, calls)
    except OSError as error:
        reason = explain(error, "write into", directory)
        raise EnvironmentFailure(f"{reason}; nothing was submitted") from error
    finally:
        discard(probe, calls)


DEFINITE = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
        errno.EACCES,
        errno.EPERM,
        errno.EMLINK,
        errno.ENOSYS,
        errno.EOPNOTSUPP,
        errno.EXDEV,
        errno.ENAMETOOLONG,
        errno.ENOTDIR,
        errno.ELOOP,
    }
)
"""Errors after which a link or rename has certainly not happened. After an error that is not in
this set, callers check the outcome. EEXIST and ENOENT are not in it: a client resends a request
whose reply was lost, and gets the error of the second request."""


def cause(failure: EnvironmentFailure) -> int:
    """Return the errno of an exception that `explain` made; 0 for other exceptions."""
    error = failure.__cause__
    return (error.errno or 0) if isinstance(error, OSError) else 0


def explain(error: OSError, action: str, path: Path) -> EnvironmentFailure:
    """Make the exception for an unexpected OSError: action, path and reason."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    name = errno.errorcode.get(error.errno or 0, "")
    return EnvironmentFailure(f"cannot {action} {path}: {reason}{f' ({name})' if name else ''}")


NO_FILE = {
    errno.EISDIR: "a directory",
    errno.ELOOP: "a symbolic link",
    errno.ENXIO: "a FIFO, a socket or a device",
}
REMEDY = "restore it from a backup, or start another trial: slurmrl submit CONFIG --new"
"""Remedy in messages about damaged files that a trial needs."""
MOVE_AWAY = "move it away: the run does not need it"


def corrupt(where: object, what: str, remedy: str = REMEDY) -> CorruptFileError:
    """Make the exception for a damaged file: its name, the damage and the remedy."""
    return CorruptFileError(f"{where} {what}; {remedy}")


def unreadable(
    error: OSError, path: Path, remedy: str = REMEDY
) -> EnvironmentFailure | CorruptFileError:
    """Make the exception for an OSError of a read.

    A path that is not a regular file counts as damage, because retrying would not help.
    """
    kind = NO_FILE.get(error.errno or 0)
    if kind is not None:
        return corrupt(path, f"is {kind}, not a regular file", remedy)
    return explain(error, "read", path)
