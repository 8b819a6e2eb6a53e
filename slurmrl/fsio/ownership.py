"""Ownership checks of run directories: anyone who can write there can run code as the user."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from slurmrl.errors import EnvironmentFailure, OwnershipError
from slurmrl.fsio.atomic import DIRECTORY_MODE
from slurmrl.fsio.calls import REAL, SystemCalls
from slurmrl.fsio.failures import explain

ROOT_UID = 0


def check(run: Path, *, calls: SystemCalls = REAL) -> list[str]:
    """Check that no other user can change the contents of a run directory; return warnings.

    The directory must belong to the user and have mode 0700. No directory above it may be
    world-writable without the sticky bit; symbolic links in the path and their targets are checked
    too. Directories that a group or another user can write to only cause a warning, because many
    clusters have such project directories.

    Raises OwnershipError with the reason, EnvironmentFailure if the directory does not answer.
    """
    warnings: list[str] = []
    try:
        _check_own(run, calls.lstat(run))
        for directory in _ancestors(run):
            warnings += _check_ancestor(directory, calls)
    except EnvironmentFailure:
        raise
    except OSError as error:
        raise explain(error, "check the owner of", run) from error
    return warnings


def check_file(path: Path, *, calls: SystemCalls = REAL) -> list[str]:
    """Check that only the user and root can change a file of settings; return warnings.

    Others may read it.

    Raises OwnershipError with the reason, EnvironmentFailure if the file system does not answer.
    """
    warnings: list[str] = []
    try:
        found = calls.stat(path)
        mode = stat.S_IMODE(found.st_mode)
        if found.st_uid not in (ROOT_UID, os.geteuid()):
            raise OwnershipError(f"{path} belongs to user {found.st_uid}, not to you; not read")
        if mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise OwnershipError(
                f"{path} has mode {mode:04o}, so other users can change what runs in your name; "
                f"check what it contains, then run: chmod go-w '{path}'"
            )
        for directory in _ancestors(path):
            warnings += _check_ancestor(directory, calls)
    except EnvironmentFailure:
        raise
    except OSError as error:
        raise explain(error, "check the owner of", path) from error
    return warnings


def _check_own(run: Path, found: os.stat_result) -> None:
    if not stat.S_ISDIR(found.st_mode):
        raise OwnershipError(f"{run} is {_kind(found)}, not a directory; not used")
    if found.st_uid != os.geteuid():
        raise OwnershipError(
            f"{run} belongs to user {found.st_uid}, not to you ({os.geteuid()}); not used"
        )
    mode = stat.S_IMODE(found.st_mode) & 0o777
    if mode != DIRECTORY_MODE:
        raise OwnershipError(
            f"{run} has mode {mode:04o}, not {DIRECTORY_MODE:04o}; check who changed it and what "
            f"it contains, then run: chmod {DIRECTORY_MODE:o} '{run}'"
        )


def _ancestors(run: Path) -> Iterator[Path]:
    """Yield the parent directories, as named and with symbolic links resolved."""
    named = list(Path(os.path.abspath(run)).parents)
    yield from named
    yield from (path for path in Path(os.path.realpath(run)).parents if path not in named)


def _check_ancestor(directory: Path, calls: SystemCalls) -> list[str]:
    name = calls.lstat(directory)
    if stat.S_ISLNK(name.st_mode) and name.st_uid not in (ROOT_UID, os.geteuid()):
        raise OwnershipError(f"{directory} is a symbolic link of user {name.st_uid}; not followed")
    found = calls.stat(directory)
    sticky = bool(found.st_mode & stat.S_ISVTX)
    if found.st_mode & stat.S_IWOTH and not sticky:
        raise OwnershipError(
            f"{directory} is world-writable (mode {stat.S_IMODE(found.st_mode):04o}): any user "
            "could replace what is in it; choose another one"
        )
    warnings = []
    if found.st_mode & stat.S_IWGRP and not sticky:
        warnings.append(f"{directory} is writable by group {found.st_gid}: its members are trusted")
    if found.st_uid not in (ROOT_UID, os.geteuid()):
        warnings.append(f"{directory} belongs to user {found.st_uid}, who is trusted")
    return warnings


def _kind(found: os.stat_result) -> str:
    return "a symbolic link" if stat.S_ISLNK(found.st_mode) else "a file"
