"""Files of samples: what rollout tasks write and trainers read. Torch-free.

A file holds the groups that a task has finished within a short time, one safetensors document
behind the other, so that each can be read alone. A group exists from the moment when a record of
the task's result log names it (`StoredGroup`); what no record names is the rest of a killed writer.
The files are described in docs/protocols.md.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Container, Sequence
from contextlib import suppress
from pathlib import Path

from slurmrl.backoff import HIDDEN_PAUSES_S, attempts
from slurmrl.data.ledger import StoredGroup
from slurmrl.errors import SampleFileError
from slurmrl.fsio import atomic
from slurmrl.fsio.calls import REAL, SystemCalls
from slurmrl.fsio.failures import NO_FILE, explain
from slurmrl.fsio.primitives import discard, make_private, opened, pwrite_all
from slurmrl.rollouts.sample_group import SampleGroup
from slurmrl.tensors.checkpoint.tensors import Checksum

READ_BYTES = 4 << 20
"""Read at a time."""
_FILE = re.compile(r"([0-9]+)\.samples")
_DAMAGE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.EIO, *NO_FILE})
"""Errors that concern one file: others may be readable."""


class SampleWriter:
    """Writes the files of one attempt of a task, which has the directory ``folder`` for itself."""

    def __init__(self, folder: Path, *, calls: SystemCalls = REAL) -> None:
        """Raises EnvironmentFailure."""
        self._folder = folder
        self._calls = calls
        self._number = 0
        atomic.make_private_directory(folder, calls=calls)

    def write(self, groups: Sequence[SampleGroup]) -> tuple[StoredGroup, ...]:
        """Write the next file, which is on disk when this returns.

        The caller then records it, before it writes another one.

        Raises EnvironmentFailure; the groups can be written again then.
        """
        name = f"{self._number:08d}.samples"
        parts = [group.to_bytes() for group in groups]
        self._write(self._folder / name, b"".join(parts))
        self._number += 1
        stored, offset = [], 0
        for group, data in zip(groups, parts, strict=True):
            stored.append(
                StoredGroup(
                    item=group.item,
                    lease=group.lease,
                    file=name,
                    offset=offset,
                    length=len(data),
                    checksum=_digest(data),
                    versions=group.versions,
                )
            )
            offset += len(data)
        return tuple(stored)

    def _write(self, path: Path, data: bytes) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW  # a failed try may be there
        try:
            with opened(path, flags, self._calls) as descriptor:
                make_private(descriptor, self._calls)
                pwrite_all(descriptor, data, 0, self._calls)
                self._calls.fsync(descriptor)
        except OSError as error:
            discard(path, self._calls)  # gives the space back on a full disk
            if isinstance(error, FileNotFoundError):
                self._make_folder_again()
            raise explain(error, "write", path) from error
        atomic.sync_directory(self._folder, calls=self._calls)

    def _make_folder_again(self) -> None:
        """Make the folder for the next try: a user or a purge of empty folders has removed it.

        If its parent is gone too, the attempt is lost, and the task ends by itself.
        """
        atomic.make_private_directory(self._folder, parents=False, calls=self._calls)


def read_group(folder: Path, stored: StoredGroup, *, calls: SystemCalls = REAL) -> SampleGroup:
    """Read a recorded group, and nothing else of its file.

    Where this host may see an old state of the directory, what looks missing or damaged is read
    again for about a minute. Raises SampleFileError if it is (the group must be made again),
    EnvironmentFailure.
    """
    pauses_s = HIDDEN_PAUSES_S if calls.caches(folder) else ()
    for last in attempts(pauses_s, lambda pause_s: calls.sleep(pause_s)):
        with suppress(*(() if last else (SampleFileError,))):
            return read_once(folder, stored, calls=calls)
    raise AssertionError("unreachable: the last attempt returns or raises")


def read_once(folder: Path, stored: StoredGroup, *, calls: SystemCalls = REAL) -> SampleGroup:
    """`read_group` for callers that look again in a way of their own. Raises as it does."""
    path = folder / stored.file
    where = f"{path}, item {stored.item},"
    try:
        data = _read(path, stored.offset, stored.length, calls)
    except OSError as error:
        if error.errno in _DAMAGE:
            reason = os.strerror(error.errno or 0)
            raise SampleFileError(f"{path} cannot be read: {reason}") from error
        raise explain(error, "read", path) from error
    if len(data) < stored.length:
        raise SampleFileError(f"{where} is cut")
    if _digest(data) != stored.checksum:
        raise SampleFileError(f"{where} has another checksum")
    try:
        group = SampleGroup.from_bytes(data)
    except ValueError as error:
        raise SampleFileError(f"{where} holds no samples: {error}") from error
    if (group.item, group.lease, group.versions) != (stored.item, stored.lease, stored.versions):
        raise SampleFileError(f"{where} is item {group.item} of lease {group.lease}")
    return group


def remove_settled(
    folder: Path, needed: Container[str], newest: str | None, *, calls: SystemCalls = REAL
) -> list[str]:
    """Remove the files up to ``newest`` that are not ``needed``; return their names.

    ``newest`` is the last file that a record names; later ones may not have their record yet. None:
    the attempt has ended and its log was read to the end. ``needed`` are those with groups that are
    unsettled in the newest commit. Raises EnvironmentFailure; what is left is removed the next
    time.
    """
    try:
        names = atomic.list_names(folder, calls=calls)
    except FileNotFoundError:  # nothing was written yet
        return []
    most = None if newest is None else _number_of(newest)
    removed = []
    for name in names:
        number = _number_of(name)
        old = number is not None and (most is None or number <= most)
        if old and name not in needed and atomic.remove(folder / name, calls=calls):
            removed.append(name)
    return removed


def _number_of(name: str) -> int | None:
    found = _FILE.fullmatch(name)
    return None if found is None else int(found[1])


def _read(path: Path, offset: int, length: int, calls: SystemCalls) -> bytes:
    """These bytes of a file, or those of them that it has."""
    parts = []
    with opened(path, os.O_RDONLY | os.O_NOFOLLOW, calls) as descriptor:
        while length and (part := calls.pread(descriptor, min(READ_BYTES, length), offset)):
            parts.append(part)
            offset, length = offset + len(part), length - len(part)
    return b"".join(parts)


def _digest(data: bytes) -> str:
    found = Checksum()
    found.update(data)
    return str(found)
