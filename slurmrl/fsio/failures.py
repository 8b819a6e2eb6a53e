"""Which errors of the file system mean what."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from slurmrl.errors import CorruptFileError, EnvironmentFailure

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
"""Errors after which a link or rename has certainly not happened. After any other one (EIO,
ESTALE, ETIMEDOUT, but also EEXIST and ENOENT: a server repeats a request whose reply was lost)
it may have, so the outcome has to be looked up."""


def cause(failure: EnvironmentFailure) -> int:
    """The error number that `explain` was given; 0 for a failure of another kind."""
    error = failure.__cause__
    return (error.errno or 0) if isinstance(error, OSError) else 0


def explain(error: OSError, action: str, path: Path) -> EnvironmentFailure:
    """What to raise for an OSError that nobody expects: the action, the path and the reason."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    name = errno.errorcode.get(error.errno or 0, "")
    return EnvironmentFailure(f"cannot {action} {path}: {reason}{f' ({name})' if name else ''}")


NO_FILE = {
    errno.EISDIR: "a directory",
    errno.ELOOP: "a symbolic link",
    errno.ENXIO: "a FIFO, a socket or a device",
}
REMEDY = "restore it from a backup, or start another trial: slurmrl submit CONFIG --new"
"""For files that a trial cannot do without."""
MOVE_AWAY = "move it away: it is only a record for people"


def corrupt(where: object, what: str, remedy: str = REMEDY) -> CorruptFileError:
    """For a file of ours that does not hold what we wrote: its name, what is wrong, what to do."""
    return CorruptFileError(f"{where} {what}; {remedy}")


def unreadable(
    error: OSError, path: Path, remedy: str = REMEDY
) -> EnvironmentFailure | CorruptFileError:
    """What to raise for an OSError of a read: something that is no file is damage, which trying
    again does not mend."""
    kind = NO_FILE.get(error.errno or 0)
    if kind is not None:
        return corrupt(path, f"is {kind}, not a regular file", remedy)
    return explain(error, "read", path)
