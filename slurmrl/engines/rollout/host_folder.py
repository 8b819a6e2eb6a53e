"""Private folders in the memory of this host, for what a server of this host reads."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from slurmrl.errors import OwnershipError
from slurmrl.fsio.failures import explain

ROOT = Path("/dev/shm")


class HostFolder:
    """A new folder with mode 0700 that is locked while this process lives.

    A process that is killed leaves its folder behind. `remove_unused` removes it, and so does the
    next process of this user on the host that makes a folder.
    """

    def __init__(self, root: Path = ROOT) -> None:
        """Raises EnvironmentFailure if it cannot be made, OwnershipError if another user could
        change it."""
        parent = _parent(root)
        try:
            parent.mkdir(mode=0o700, exist_ok=True)
            status = parent.lstat()
            if status.st_uid != os.getuid() or status.st_mode & 0o077:
                raise OwnershipError(f"{parent} must belong to you with mode 0700; remove it")
            with (parent / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                _remove_unlocked(parent)
                self.path = Path(tempfile.mkdtemp(dir=parent))
                self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
                fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        except OSError as error:
            if isinstance(error, OwnershipError):
                raise
            raise explain(error, "make a folder in", parent) from error

    def close(self) -> None:
        """Remove it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._descriptor)


def remove_unused(root: Path = ROOT) -> None:
    """Remove the folders of this user's processes that were killed. What cannot be removed now is
    left to the next one that makes a folder."""
    parent = _parent(root)
    with suppress(OSError):
        if parent.lstat().st_uid == os.getuid():
            with (parent / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                _remove_unlocked(parent)


def _parent(root: Path) -> Path:
    return root / f"slurmrl-{os.getuid()}"


def _remove_unlocked(parent: Path) -> None:
    """Under the lock of ``parent``."""
    for folder in parent.iterdir():
        if not folder.is_dir():
            continue
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # its process lives
        else:
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)
