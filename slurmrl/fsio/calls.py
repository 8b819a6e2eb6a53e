"""The seam to the operating system: one thin method per file system operation.

All access to the shared directory goes through a `SystemCalls`, so that tests can replace it with
layers that record, fail, delay or show a stale view.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterable
from pathlib import Path

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
"""File system types (statfs(2)) on which the kernel sees every change. All others count as shared:
NFS, Lustre, GPFS, BeeGFS, CephFS, FUSE, SMB and unknown types."""

_STRUCT_BYTES = 512
"""Larger than any struct statfs, whose first field is a long: the type."""


def is_local(directory: Path) -> bool:
    """Return whether a directory is on a local file system; False if that is unknown."""
    import ctypes  # a command of the command line seldom needs it

    buffer = (ctypes.c_long * (_STRUCT_BYTES // ctypes.sizeof(ctypes.c_long)))()
    library = ctypes.CDLL(None, use_errno=True)
    if library.statfs(os.fsencode(directory), ctypes.byref(buffer)) != 0:
        return False
    return (buffer[0] & 0xFFFFFFFF) in LOCAL_MAGIC


class SystemCalls:
    """The real operations. Errors are the OSErrors of the operating system."""

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
        """Return whether this machine may see a stale state of a directory.

        This is impossible on a local file system.
        """
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
        """Permission bits of an open file."""
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
"""The default everywhere; stateless."""
