"""File change notification by inotify, on local file systems only.

It is only a hint: callers also poll now and then. On a shared file system, or when the kernel has
no watches left, a `Wakeup` follows nothing.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

from slurmrl.fsio.calls import is_local

SAFETY_S = 1.0
"""Longest pause between polls while every change is reported."""
_EVENT_BYTES = 65536
_IN_MODIFY = 0x2
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC  # the values of IN_NONBLOCK and IN_CLOEXEC


class Wakeup:
    """Reports writes to the files that it follows, in one directory."""

    def __init__(self, directory: Path) -> None:
        self._library = ctypes.CDLL(None, use_errno=True)
        self._descriptor = self._library.inotify_init1(_FLAGS) if is_local(directory) else -1
        self._followed: set[Path] = set()

    def fileno(self) -> int:
        """A descriptor that is readable when a file has changed since the last `drain`; -1 if
        notification is not available."""
        return int(self._descriptor)

    def follow(self, paths: Iterable[Path]) -> bool:
        """Follow those of the files that exist; return whether all of them are followed now.

        Changes after the return are reported, so first follow, then read, then wait.
        """
        if self._descriptor < 0:
            return False
        for path in paths:
            if path not in self._followed:
                watch = self._library.inotify_add_watch(
                    self._descriptor, os.fsencode(path), _IN_MODIFY
                )
                if watch < 0:
                    return False
                self._followed.add(path)
        return True

    def drain(self) -> None:
        """Discard the changes reported so far; the caller reads the files next."""
        if self._descriptor < 0:
            return
        try:
            while os.read(self._descriptor, _EVENT_BYTES):
                pass
        except BlockingIOError:
            return

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
