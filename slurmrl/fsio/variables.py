"""Private files of environment variables, for secrets such as tokens."""

from __future__ import annotations

import os
import re
import shlex
import stat
from pathlib import Path

from slurmrl.errors import EnvironmentFailure, OwnershipError, UsageError
from slurmrl.fsio import inputs
from slurmrl.fsio.failures import explain

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_RESERVED = "SLURM"


def read(path: Path) -> dict[str, str]:
    """Read ``NAME=VALUE`` lines in shell syntax.

    Quotes, comments and ``export`` are allowed; nothing is expanded.

    Raises:
    - OwnershipError unless the file belongs to the user with mode 0600 or less;
    - UsageError if it is not a regular file, and for any other line, which is not quoted because it
      may be secret;
    - EnvironmentFailure.
    """
    try:
        with inputs.opened(path) as file:
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
                    f"{path}:{number}: expected NAME=VALUE, NAME not starting with {_RESERVED}"
                )
            found[assignment[1]] = assignment[2]
    return found


def _check(path: Path, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise OwnershipError(f"{path} belongs to user {found.st_uid}, not to you; not read")
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        raise OwnershipError(
            f"{path} has mode {mode:04o}, so other users can read secrets in it: chmod 600 '{path}'"
        )


def _words(path: Path, number: int, line: str) -> list[str]:
    try:
        words = shlex.split(line, comments=True)
    except ValueError as error:
        raise UsageError(f"{path}:{number}: {error}") from error
    return words[1:] if words[:1] == ["export"] else words
