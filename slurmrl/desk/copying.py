"""Copies of code, readable by their owner only and without files that are never imported."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePath

from slurmrl.errors import EnvironmentFailure, UsageError
from slurmrl.fsio import atomic
from slurmrl.fsio.calls import REAL
from slurmrl.fsio.failures import explain
from slurmrl.fsio.primitives import write_new

LARGEST_BYTES = 64 * 2**20
MOST_FILES = 10_000
"""A folder with more files is data rather than code."""


def check_size(source: Path) -> None:
    """Raise UsageError for a folder that is too large to be code."""
    count, size = 0, 0
    for _, path in files(source):
        count, size = count + 1, size + path.stat().st_size
        if count > MOST_FILES or size > LARGEST_BYTES:
            raise UsageError(
                f"'{source}' has more than {MOST_FILES} files or {LARGEST_BYTES >> 20} MiB: name "
                "only the code that the run imports, and keep data out of its folder"
            )


def copy(source: Path, target: Path, without: Collection[str] = ()) -> None:
    """Copy a file or a folder durably.

    Follow symbolic links; leave out hidden, compiled and special files, modes, and the entries of
    the folder itself that are named in ``without``.

    Raises EnvironmentFailure with the file that could not be read or written.
    """
    if source.is_dir():
        atomic.make_private_directory(target)
    for relative, path in files(source, without):
        copied = target / relative
        atomic.make_private_directory(copied.parent)
        try:
            write_new(copied, path.read_bytes(), True, REAL)
        except EnvironmentFailure:
            raise
        except OSError as error:
            raise explain(error, "copy", path) from error


def stamps(sources: Mapping[Path, Collection[str]]) -> dict[Path, tuple[int, ...]]:
    """What changes whenever one of the files to copy does: their names, sizes, times and inodes.

    ``sources``: each with what is left out of it.
    """
    found: dict[Path, tuple[int, ...]] = {}
    for source, without in sources.items():
        for _, path in files(source, without):
            with suppress(FileNotFoundError):
                status = path.stat()
                times = (status.st_mtime_ns, status.st_ctime_ns)
                found[path] = (status.st_size, status.st_ino, *times)
    return found


def files(source: Path, without: Collection[str] = ()) -> Iterator[tuple[PurePath, Path]]:
    """Yield the files to copy (see `copy`), with their names in the copy.

    If the source is a file, yield it. Raises EnvironmentFailure for a folder that cannot be listed.
    """
    if not source.is_dir():
        yield PurePath(), source
        return
    yield from _below(source, PurePath(), frozenset(), without)


def _below(
    folder: Path, relative: PurePath, above: frozenset[str], without: Collection[str] = ()
) -> Iterator[tuple[PurePath, Path]]:
    """``above``: the real folders on the path here; a link back to one of them is not followed."""
    real = os.path.realpath(folder)
    if real in above:
        return
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise explain(error, "list", folder) from error
    for entry in entries:
        if entry.name.startswith(".") or entry.name == "__pycache__" or entry.suffix == ".pyc":
            continue
        if entry.name in without:
            continue
        if entry.is_dir():
            yield from _below(entry, relative / entry.name, above | {real})
        elif entry.is_file():
            yield relative / entry.name, entry
