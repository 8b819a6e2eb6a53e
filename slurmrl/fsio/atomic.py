"""Atomic operations on whole files: no partial files; only one exclusive create succeeds.

The module also checks ownership, because anyone who can write to a run directory can run code as
its user.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from stat import S_IMODE, S_ISGID
from typing import IO

from slurmrl.backoff import UNCLEAR_PAUSES_S, attempts
from slurmrl.errors import EnvironmentFailure, OwnershipError
from slurmrl.fsio.calls import (
    DEFINITE,
    REAL,
    SystemCalls,
    corrupt,
    discard,
    explain,
    is_temporary,
    make_private,
    opened,
    read_all,
    temporary_beside,
    unreadable,
    write_all,
    write_new,
    write_new_parts,
)

DIRECTORY_MODE = 0o700
LIMIT_BYTES = 64 << 20
"""Default limit of `read`. The largest files, plans of thousands of hosts, have a few MB."""


def exclusive_create(
    path: Path, data: bytes, *, durable: bool = True, calls: SystemCalls = REAL
) -> bool:
    """Create ``path`` with ``data``; return True if this call created it, False if it exists.

    The caller makes ``data`` unique with a nonce. After EEXIST or an error with an unclear outcome,
    only the content of ``path`` shows who created it (cached link counts may be wrong). With
    ``durable``, content and name are on disk when True is returned. Raises EnvironmentFailure.
    """
    for last in _attempts(calls):
        try:
            _write_and_link(path, data, durable, calls)
        except OSError as error:
            found = None if error.errno in DEFINITE else _read_if_there(path, calls)
            if found is not None and found != data:
                return False
            if found is None:
                _raise_if_final(error, "create", path, last, calls)
                continue
        if durable:
            sync_directory(path.parent, calls=calls)
        return True
    raise AssertionError("unreachable: the last try returns or raises")


def replace(path: Path, data: bytes, *, durable: bool = True, calls: SystemCalls = REAL) -> None:
    """Replace the content of ``path``: readers see either the old or the new content.

    Raises EnvironmentFailure; ``path`` then has either the old or the new content.
    """
    for last in _attempts(calls):
        try:
            _write_and_rename(path, data, durable, calls)
        except OSError as error:
            if error.errno in DEFINITE or _read_if_there(path, calls) != data:
                _raise_if_final(error, "replace", path, last, calls)
                continue
        if durable:
            sync_directory(path.parent, calls=calls)
        return


def replace_by_parts(path: Path, parts: Iterable[bytes], *, calls: SystemCalls = REAL) -> None:
    """Replace the content of ``path`` durably by ``parts``, which need not fit into memory.

    Raises EnvironmentFailure, and whatever ``parts`` raises.
    """
    temporary = temporary_beside(path)
    try:
        write_new_parts(temporary, parts, True, calls)
        calls.rename(temporary, path)
    except OSError as error:
        raise explain(error, "replace", path) from error
    finally:
        discard(temporary, calls)
    sync_directory(path.parent, calls=calls)


def read(path: Path, *, calls: SystemCalls = REAL, limit_bytes: int = LIMIT_BYTES) -> bytes:
    """Return the content of a file.

    After ESTALE, try again: the file was replaced on the server while this process held its handle.
    Raises FileNotFoundError, CorruptFileError if it is not a regular file or is larger than
    ``limit_bytes``, EnvironmentFailure for other errors.
    """
    for last in _attempts(calls):
        try:
            with opened(path, os.O_RDONLY | os.O_NOFOLLOW, calls) as descriptor:
                data = read_all(descriptor, calls, limit_bytes)
        except FileNotFoundError:
            raise
        except OSError as error:
            if error.errno != errno.ESTALE or last:
                raise unreadable(error, path) from error
            _raise_if_final(error, "read", path, last, calls)
            continue
        if data is None:
            raise corrupt(path, f"is larger than {limit_bytes} bytes")
        return data
    raise AssertionError("unreachable: the last try returns or raises")


def read_needed(path: Path, *, calls: SystemCalls = REAL) -> bytes:
    """Return the content as `read` does. Raises CorruptFileError if the file is missing."""
    try:
        return read(path, calls=calls)
    except FileNotFoundError as error:
        raise corrupt(path, "is missing") from error


def append(path: Path, data: bytes, *, calls: SystemCalls = REAL) -> int:
    """Append to a file that only one process writes at a time; create it if it is missing.

    Return the offset of the data. A crash can leave part of the data. Raises EnvironmentFailure.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    try:
        with opened(path, flags, calls) as descriptor:
            make_private(descriptor, calls)
            offset = os.fstat(descriptor).st_size
            write_all(descriptor, data, calls)
    except OSError as error:
        raise explain(error, "append to", path) from error
    return offset


def truncate(path: Path, size: int, *, calls: SystemCalls = REAL) -> None:
    """Truncate a file durably; after a crash it has either the old or the new size.

    Raises EnvironmentFailure.
    """
    try:
        with opened(path, os.O_WRONLY | os.O_NOFOLLOW, calls) as descriptor:
            calls.truncate(descriptor, size)
            calls.fsync(descriptor)
    except OSError as error:
        raise explain(error, "truncate", path) from error


def remove(path: Path, *, calls: SystemCalls = REAL) -> bool:
    """Remove a file; return False if it did not exist. Raises EnvironmentFailure."""
    try:
        calls.unlink(path)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise explain(error, "remove", path) from error
    return True


def remove_exactly(path: Path, data: bytes, *, calls: SystemCalls = REAL) -> bool:
    """Remove a file only if it holds ``data``; return whether it was removed.

    Rename the file, compare its content again, and put the file back if another writer has
    replaced it. Raises EnvironmentFailure.
    """
    if _read_if_there(path, calls) != data:
        return False
    aside = temporary_beside(path)
    try:
        calls.rename(path, aside)
        ours = read(aside, calls=calls) == data
        if not ours:
            with suppress(FileExistsError):
                calls.link(aside, path)
        calls.unlink(aside)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise explain(error, "remove", path) from error
    return ours


def list_names(directory: Path, *, calls: SystemCalls = REAL) -> list[str]:
    """Return the sorted names in a directory, except names of temporary files.

    Raises FileNotFoundError if the directory does not exist, EnvironmentFailure for other errors.
    """
    return sorted(name for name in _listing(directory, calls) if not is_temporary(name))


def known_names(directory: Path, *, calls: SystemCalls = REAL) -> list[str] | None:
    """Return the names in a directory; None if it cannot be listed or is empty.

    An empty directory may be a mount point whose file system is not mounted.
    """
    try:
        return list(calls.listdir(directory)) or None
    except OSError:
        return None


def is_absent(path: Path, *, calls: SystemCalls = REAL) -> bool:
    """Return whether a path is certainly missing from the `known_names` of its directory."""
    names = known_names(path.parent, calls=calls)
    return names is not None and path.name not in names


def sync_file(path: Path, *, calls: SystemCalls = REAL) -> None:
    """Wait until a file's content is on disk. Raises EnvironmentFailure."""
    try:
        with opened(path, os.O_RDONLY, calls) as descriptor:
            calls.fsync(descriptor)
    except OSError as error:
        raise explain(error, "sync", path) from error


def sync_directory(directory: Path, *, calls: SystemCalls = REAL) -> None:
    """Wait until a directory's entries are on disk. Raises EnvironmentFailure."""
    try:
        calls.fsync_directory(directory)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: this file system cannot sync a directory.
            raise explain(error, "sync", directory) from error


def make_private_directory(path: Path, *, parents: bool = True, calls: SystemCalls = REAL) -> None:
    """Create a directory and its missing ``parents`` with mode 0700, regardless of the umask.

    New directories are on disk when the function returns. Existing directories keep their mode.
    Raises EnvironmentFailure.
    """
    try:
        _make_one(path, calls)
    except FileNotFoundError as missing:
        if not parents:
            raise explain(missing, "make directory", path) from missing
        make_private_directory(path.parent, calls=calls)
        try:
            _make_one(path, calls)
        except FileNotFoundError as error:  # An automounter reports an unknown name in this way.
            raise explain(error, "make directory", path) from error


def _make_one(path: Path, calls: SystemCalls) -> None:
    """Make one directory. Raises EnvironmentFailure, or FileNotFoundError without parent."""
    try:
        calls.mkdir(path, DIRECTORY_MODE)
        mode = S_IMODE(calls.stat(path).st_mode)
        if mode & 0o777 != DIRECTORY_MODE:
            # Keep the setgid bit: group quotas depend on it.
            calls.chmod(path, DIRECTORY_MODE | mode & S_ISGID)
        sync_directory(path.parent, calls=calls)
    except FileExistsError as error:
        if not path.is_dir():
            raise EnvironmentFailure(f"{path} exists but is not a directory") from error
    except FileNotFoundError:
        raise
    except OSError as error:
        raise explain(error, "make directory", path) from error


def open_log(path: Path) -> IO[bytes]:
    """Open a log file for appending, readable by its owner only. Raises EnvironmentFailure."""
    make_private_directory(path.parent)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    try:
        descriptor = REAL.open(path, flags)
        make_private(descriptor, REAL)
    except OSError as error:
        raise explain(error, "open", path) from error
    return os.fdopen(descriptor, "ab", 0)


def sweep_temporaries(directory: Path, *, calls: SystemCalls = REAL) -> int:
    """Remove temporary files that killed writers left; return their number.

    The call is safe at any time: a writer that loses its temporary file writes another file. The
    age of a file does not matter, because it depends on the clock of another machine.
    """
    leftovers = [name for name in _listing(directory, calls) if is_temporary(name)]
    return sum(remove(directory / name, calls=calls) for name in leftovers)


def probe_link(directory: Path, *, calls: SystemCalls = REAL) -> None:
    """Check that link(2) works in a directory. Raises EnvironmentFailure with the reason."""
    target = temporary_beside(directory / "probe")
    try:
        _write_and_link(target, b"probe", False, calls)
        calls.unlink(target)
    except OSError as error:
        reason = explain(error, "make a hard link in", directory)
        raise EnvironmentFailure(
            f"{reason}; the run directory must be on a file system with hard links"
        ) from error


def _attempts(calls: SystemCalls) -> Iterator[bool]:
    """Yield once per attempt at an operation that may fail briefly: True for the last attempt."""
    return attempts(UNCLEAR_PAUSES_S, lambda pause_s: calls.sleep(pause_s))


def _write_and_link(path: Path, data: bytes, durable: bool, calls: SystemCalls) -> None:
    temporary = temporary_beside(path)
    try:
        write_new(temporary, data, durable, calls)
        calls.link(temporary, path)
    finally:
        discard(temporary, calls)


def _write_and_rename(path: Path, data: bytes, durable: bool, calls: SystemCalls) -> None:
    temporary = temporary_beside(path)
    try:
        write_new(temporary, data, durable, calls)
        calls.rename(temporary, path)
    except OSError:
        discard(temporary, calls)
        raise


def _listing(directory: Path, calls: SystemCalls) -> list[str]:
    try:
        return list(calls.listdir(directory))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise explain(error, "list", directory) from error


def _read_if_there(path: Path, calls: SystemCalls) -> bytes | None:
    try:
        return read(path, calls=calls)
    except FileNotFoundError:
        return None


def _raise_if_final(
    error: OSError, action: str, path: Path, last: bool, calls: SystemCalls
) -> None:
    """Raise EnvironmentFailure unless another attempt is left that could succeed."""
    if last or error.errno in DEFINITE or not _directory_is_there(path.parent, calls):
        raise explain(error, action, path) from error


def _directory_is_there(directory: Path, calls: SystemCalls) -> bool:
    try:
        calls.stat(directory)
    except OSError as error:
        return not isinstance(error, FileNotFoundError)
    return True


ROOT_UID = 0


def check_ownership(run: Path, *, calls: SystemCalls = REAL) -> list[str]:
    """Check that no other user can change the contents of a run directory; return warnings.

    The directory must belong to the user and have mode 0700. No directory above it may be
    world-writable without the sticky bit; symbolic links in the path and their targets are checked
    too. Directories that a group or another user can write to only cause a warning, because many
    clusters have such project directories.

    Raises OwnershipError with the reason, EnvironmentFailure if the file system does not answer.
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


def check_file_ownership(path: Path, *, calls: SystemCalls = REAL) -> list[str]:
    """Check that only the user and root can change a file of settings; return warnings.

    Other users may read the file.

    Raises OwnershipError with the reason, EnvironmentFailure if the file system does not answer.
    """
    warnings: list[str] = []
    try:
        found = calls.stat(path)
        mode = stat.S_IMODE(found.st_mode)
        if found.st_uid not in (ROOT_UID, os.geteuid()):
            raise OwnershipError(
                f"{path} was not read: it belongs to user {found.st_uid}, not to you or root"
            )
        if mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise OwnershipError(
                f"{path} has mode {mode:04o}, so other users can change what runs in your name; "
                f"check its content, then run: chmod go-w '{path}'"
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
        kind = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "a file"
        raise OwnershipError(f"{run} is {kind}, not a directory, so no run can use it")
    if found.st_uid != os.geteuid():
        raise OwnershipError(
            f"{run} belongs to user {found.st_uid}, not to you (user {os.geteuid()}); choose "
            "another directory"
        )
    mode = stat.S_IMODE(found.st_mode) & 0o777
    if mode != DIRECTORY_MODE:
        raise OwnershipError(
            f"{run} has mode {mode:04o}, not {DIRECTORY_MODE:04o}; check who changed it, and its "
            f"content, then run: chmod {DIRECTORY_MODE:o} '{run}'"
        )


def _ancestors(run: Path) -> Iterator[Path]:
    """Yield the parent directories, as named and with symbolic links resolved."""
    named = list(Path(os.path.abspath(run)).parents)
    yield from named
    yield from (path for path in Path(os.path.realpath(run)).parents if path not in named)


def _check_ancestor(directory: Path, calls: SystemCalls) -> list[str]:
    name = calls.lstat(directory)
    if stat.S_ISLNK(name.st_mode) and name.st_uid not in (ROOT_UID, os.geteuid()):
        raise OwnershipError(
            f"{directory} is a symbolic link of user {name.st_uid}, who could change its target; "
            "choose another path"
        )
    found = calls.stat(directory)
    sticky = bool(found.st_mode & stat.S_ISVTX)
    if found.st_mode & stat.S_IWOTH and not sticky:
        raise OwnershipError(
            f"{directory} is world-writable (mode {stat.S_IMODE(found.st_mode):04o}): any user "
            "could replace its files; choose another directory"
        )
    warnings = []
    if found.st_mode & stat.S_IWGRP and not sticky:
        warnings.append(
            f"{directory} is writable by group {found.st_gid}: its members can replace your files"
        )
    if found.st_uid not in (ROOT_UID, os.geteuid()):
        warnings.append(
            f"{directory} belongs to user {found.st_uid}, who can replace your files in it"
        )
    return warnings
