"""Files of environment variables that nobody else may read: where tokens come from."""

from __future__ import annotations

import os
import re
import shlex
import stat
from pathlib import Path

from slurmrl.errors import EnvironmentFailure, OwnershipError, UsageError
from slurmrl.fsio.failures import explain

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_RESERVED = "SLURM"


def read(path: Path) -> dict[str, str]:
    """``NAME=VALUE`` lines as a shell reads them: quotes, comments and ``export`` are allowed, and
    nothing is expanded.

    Raises OwnershipError unless the file is ours and only ours (mode 0600 or less), UsageError for
    a line of another kind, which is not quoted since it may be secret, EnvironmentFailure.
    """
    try:
        with path.open("rb") as file:
            _check(path, os.fstat(file.fileno()))
            text = file.read().decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text") from error
    except EnvironmentFailure:
        raise
    except OSError as error:
        raise explain(error, "read", path) from error
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        for word in _words(path, number, line):
            assignment = _ASSIGNMENT.fullmatch(word)
            if not assignment or word.startswith(_RESERVED):
                raise UsageError(
                    f"{path}:{number}: not NAME=VALUE, or a name that starts with {_RESERVED}"
                )
            found[assignment[1]] = assignment[2]
    return found


def _check(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise EnvironmentFailure(f"{path} is not a file")
    if found.st_uid != os.geteuid():
        raise OwnershipError(f"{path} belongs to user {found.st_uid} and not to us; not read")
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        raise OwnershipError(
            f"{path} has mode {mode:04o}, so others can read what may be secret: chmod 600 '{path}'"
        )


def _words(path: Path, number: int, line: str) -> list[str]:
    try:
        words = shlex.split(line, comments=True)
    except ValueError as error:
        raise UsageError(f"{path}:{number}: {error}") from error
    return words[1:] if words[:1] == ["export"] else words
