"""Whether a directory lies on a file system of this machine alone."""

from __future__ import annotations

import ctypes
import os
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
"""Types of file systems (statfs(2)) whose changes the kernel sees all of. Anything else counts as
shared: NFS, Lustre, GPFS, BeeGFS, CephFS, FUSE, SMB and what is not known."""

_STRUCT_BYTES = 512
"""More than any struct statfs; its first field is a long, the type."""


def is_local(directory: Path) -> bool:
    """False as well where it cannot be found out."""
    buffer = (ctypes.c_long * (_STRUCT_BYTES // ctypes.sizeof(ctypes.c_long)))()
    library = ctypes.CDLL(None, use_errno=True)
    if library.statfs(os.fsencode(directory), ctypes.byref(buffer)) != 0:
        return False
    return (buffer[0] & 0xFFFFFFFF) in LOCAL_MAGIC
