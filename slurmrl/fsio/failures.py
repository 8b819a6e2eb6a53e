"""Classification of file system errors, and the exceptions and messages made from them."""

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
"""Errors after which a link or rename has certainly not happened. After any other error (EIO,
ESTALE, ETIMEDOUT, but also EEXIST and ENOENT: a client resends a request whose reply was lost)
it may have happened, so the outcome has to be checked."""


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
