"""Private folders in the memory of this host, for what a server of this host reads."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from slurmrl import log
from slurmrl.engines.rollout.warden import LIST, remove_shared
from slurmrl.fsio.failures import explain

logger = log.get(__name__)

ROOT = Path("/dev/shm")


class HostFolder:
    """A new folder with mode 0700 that is locked while this process lives.

    A process that is killed leaves its folder behind. `remove_unused` removes it, and so does the
    next process of this user on the host that makes a folder. All are in one folder of the user,
    which has another name where somebody else has taken the known one.
    """

    def __init__(self, root: Path = ROOT) -> None:
        """Raises EnvironmentFailure if it cannot be made."""
        try:
            parent = next(_parents(root), None) or _new_parent(root)
            with (parent / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                _remove_unlocked(parent)
                self.path = Path(tempfile.mkdtemp(dir=parent))
                self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
                fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        except OSError as error:
            raise explain(error, "make a folder in", root) from error

    def close(self) -> None:
        """Remove it."""
        _remove(self.path)
        os.close(self._descriptor)


def remove_unused(root: Path = ROOT) -> None:
    """Remove the folders of this user's processes that were killed. What cannot be removed now is
    left to the next one that makes a folder."""
    with suppress(OSError):
        for parent in _parents(root):
            with (parent / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                _remove_unlocked(parent)


def _parents(root: Path) -> Iterator[Path]:
    """Yield the folders of this user that nobody else can change, the known name first."""
    known = root / _known_name()
    for path in (known, *sorted(root.glob(f"{known.name}.*"))):
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue
        mine = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
        if mine and not status.st_mode & 0o077:
            yield path


def _new_parent(root: Path) -> Path:
    known = root / _known_name()
    try:
        known.mkdir(mode=0o700)
    except FileExistsError:
        if known in _parents(root):  # another process of this user was faster
            return known
        chosen = Path(tempfile.mkdtemp(prefix=f"{known.name}.", dir=root))
        logger.warning("using %s: %s is not a folder of yours with mode 0700", chosen, known)
        return chosen
    return known


def _known_name() -> str:
    return f"slurmrl-{os.getuid()}"


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
            _remove(folder)
        finally:
            os.close(descriptor)


def _remove(folder: Path) -> None:
    """Remove a folder, and what its servers have left in shared memory."""
    for place, _, names in os.walk(folder):  # others may be removing it, too
        if LIST in names:
            remove_shared(os.path.join(place, LIST))
    shutil.rmtree(folder, ignore_errors=True)
