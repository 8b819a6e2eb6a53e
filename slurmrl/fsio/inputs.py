"""Reading the user's files that a configuration names: models, tokenizers, files of variables.

Libraries treat an unreadable file like a missing file: they fail with another error or fall back to
a default. The functions of this module distinguish the two cases.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import socket
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from slurmrl.errors import EnvironmentFailure, OwnershipError, UnreadableInputError, UsageError
from slurmrl.fsio import calls, documents
from slurmrl.fsio.atomic import is_absent
from slurmrl.fsio.calls import explain

HEADER_BYTES = 512
TAR_MAGIC = (257, b"ustar")
"""Offset and bytes that mark the header of a tar archive."""
MOST_JSON_BYTES = 64 * 2**20
READ_BY_LIBRARIES = (".json", ".txt", ".model", ".tiktoken", ".jinja", ".safetensors")


def unreadable(error: OSError, path: Path) -> UnreadableInputError:
    return missing(path, f"{path} cannot be read: {error.strerror or error}")


def missing(path: Path, message: str) -> UnreadableInputError:
    """Make the exception for a path that was not found or could not be read."""
    return UnreadableInputError(message, str(path) if is_absent(path) else "")


def require(paths: Iterable[Path]) -> None:
    """Raise UnreadableInputError if a path, which existed at submission, is not on this host."""
    for path in paths:
        if not path.exists():
            host = socket.gethostname()
            raise missing(path, f"{path} is not on {host}; is its file system mounted there?")


def list_names(folder: Path) -> set[str]:
    """Return the names in a folder. Raises UnreadableInputError."""
    try:
        return set(os.listdir(folder))
    except OSError as error:
        raise unreadable(error, folder) from error


def read(path: Path) -> bytes:
    """Return a file's content.

    Raises UnreadableInputError, and UsageError if it is not a regular file.
    """
    try:
        with opened(path) as file:
            return file.read()
    except OSError as error:
        raise unreadable(error, path) from error


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file.

    Raises OSError. Raises UsageError for other kinds of files, which are not read: a pipe without a
    writer would block, and a device has no end.
    """
    with open(path, "rb", buffering=0, opener=_without_waiting) as file:
        mode = os.fstat(file.fileno()).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise UsageError(f"{path} is not a regular file")
        yield file


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises UsageError."""
    size = path.stat().st_size if path.is_file() else 0
    if size > MOST_JSON_BYTES:
        raise UsageError(f"{path} has {size} bytes; at most {MOST_JSON_BYTES} are allowed")
    try:
        check_file(path)
        values = json.loads(read(path))
    except UsageError:
        raise
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise UsageError(f"{path} does not hold a JSON object")
    if documents.too_deep(values):
        raise UsageError(f"{path} is nested more than {documents.MOST_DEPTH} levels deep")
    return values


def check_file(path: Path) -> None:
    """Raise UnreadableInputError if a file cannot be read, UsageError for a Git LFS pointer."""
    pointer = b"version https://git-lfs"
    try:
        with opened(path) as file:
            if file.read(len(pointer)) == pointer:
                raise UsageError(
                    f"{path} is a pointer of Git LFS, not the file: run git lfs pull in its folder"
                )
    except IsADirectoryError:
        return
    except OSError as error:
        raise unreadable(error, path) from error


def check_folder(folder: Path) -> None:
    """Raise UnreadableInputError if a folder is empty or libraries cannot read a file in it."""
    names = list_names(folder)
    if not names:
        raise UnreadableInputError(f"{folder} is empty; is its file system mounted?")
    for name in sorted(names):
        if name.endswith(READ_BY_LIBRARIES):
            check_file(folder / name)


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Run a library that reads a folder.

    Raise UnreadableInputError if the folder cannot be read, or if the library fails because of an
    error of the system.
    """
    check_folder(folder)
    try:
        yield
    except Exception as error:
        if (cause := _system_error(error)) is not None:
            raise unreadable(cause, folder) from error
        check_folder(folder)
        raise


def _system_error(error: BaseException | None) -> OSError | None:
    """Return the OSError that caused an exception, or None."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return error
        error = error.__cause__ or error.__context__
    return None


OWN_VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PYTHONPATH")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=([^\0]*)")
_RULE = f"expected NAME=VALUE; NAME must not be {', '.join(OWN_VARIABLES)} or begin with SLURM"


def read_variables(path: Path) -> dict[str, str]:
    """Read ``NAME=VALUE`` lines in shell syntax.

    Quotes, comments and ``export`` are allowed; nothing is expanded.

    Raises:
    - OwnershipError unless the file belongs to the user and has mode 0600 or less;
    - UsageError if it is not a regular file, or if a line has another form (the message omits the
      line, which may be secret);
    - EnvironmentFailure.
    """
    try:
        with opened(path) as file:
            _check_private(path, os.fstat(file.fileno()))
            text = file.read().decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text") from error
    except EnvironmentFailure:
        raise
    except OSError as error:
        raise explain(error, "read", path) from error
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        for word in _shell_words(path, number, line):
            assignment = _ASSIGNMENT.fullmatch(word)
            if not assignment or word.startswith("SLURM") or assignment[1] in OWN_VARIABLES:
                raise UsageError(f"{path}:{number}: {_RULE}")
            found[assignment[1]] = assignment[2]
    return found


def _check_private(path: Path, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise OwnershipError(
            f"{path} was not read: it belongs to user {found.st_uid}, not to you; make a copy"
        )
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        raise OwnershipError(
            f"{path} has mode {mode:04o}, so other users can read secrets in it: chmod 600 '{path}'"
        )


def _shell_words(path: Path, number: int, line: str) -> list[str]:
    try:
        words = shlex.split(line, comments=True)
    except ValueError as error:
        raise UsageError(f"{path}:{number}: {error}") from error
    return words[1:] if words[:1] == ["export"] else words


def is_archive(path: Path) -> bool:
    """Return whether a file is a tar archive and therefore not a configuration file."""
    try:
        with calls.opened(path, os.O_RDONLY, calls.REAL) as descriptor:
            head = calls.REAL.read(descriptor, HEADER_BYTES)
    except OSError:
        return False  # The code that reads the file reports the error.
    offset, magic = TAR_MAGIC
    return head[offset : offset + len(magic)] == magic or path.suffix == ".tar"
