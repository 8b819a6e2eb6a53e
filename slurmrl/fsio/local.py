"""Detection of local file systems, as opposed to shared ones."""

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
"""File system types (statfs(2)) on which the kernel sees every change. All others count as shared:
NFS, Lustre, GPFS, BeeGFS, CephFS, FUSE, SMB and unknown types."""

_STRUCT_BYTES = 512
"""Larger than any struct statfs, whose first field is a long: the type."""


def is_local(directory: Path) -> bool:
    """Return whether a directory is on a local file system; False if that is unknown."""
    buffer = (ctypes.c_long * (_STRUCT_BYTES // ctypes.sizeof(ctypes.c_long)))()
    library = ctypes.CDLL(None, use_errno=True)
    if library.statfs(os.fsencode(directory), ctypes.byref(buffer)) != 0:
        return False
    return (buffer[0] & 0xFFFFFFFF) in LOCAL_MAGIC
