"""The manifest of a checkpoint directory: which files belong to it, with sizes and checksums.

A checkpoint exists once the history names it, which happens after its manifest is on disk.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slurmrl.checkpoint.shards import RoleCheckpoint, file_name
from slurmrl.checkpoint.tensors import SavedFile, checksum
from slurmrl.errors import (
    CheckpointError,
    CorruptFileError,
    DamagedCheckpointError,
    EnvironmentFailure,
)
from slurmrl.fsio import atomic, documents
from slurmrl.fsio.calls import REAL, SystemCalls
from slurmrl.fsio.failures import NO_FILE, cause, explain
from slurmrl.fsio.shapes import FILE_NAME, INTEGER, SIZE, TEXT, Fields, list_of, table, wrong

MANIFEST = "manifest.json"
STATE = "state.json"
VERSION = 1
UNREADABLE = (errno.EIO, *NO_FILE)
"""Errors of a file itself. Others (ESTALE, EACCES, …) tell nothing about what was written."""
_FILE: Fields = {"name": FILE_NAME, "size": SIZE, "checksum": TEXT}
_FIELDS: Fields = {"version": INTEGER, "step": INTEGER, "files": list_of(table(_FILE, _FILE))}


@dataclass(frozen=True)
class Manifest:
    step: int
    files: tuple[SavedFile, ...]


def write_manifest(
    directory: Path,
    *,
    step: int,
    files: Iterable[Mapping[str, Any]],
    state: Mapping[str, Any],
    calls: SystemCalls = REAL,
) -> Manifest:
    """Write ``state.json`` and then ``manifest.json``, durably, the directory included.

    ``files`` are the ranks' SavedFiles as objects of JSON; ``state`` is everything else that a
    run needs to continue.
    """
    text = _json(state)
    atomic.replace(directory / STATE, text, calls=calls)
    own = SavedFile(STATE, len(text), f"sha256:{hashlib.sha256(text).hexdigest()}")
    manifest = Manifest(step, (*(SavedFile(**file) for file in files), own))
    atomic.replace(
        directory / MANIFEST, _json({"version": VERSION, **asdict(manifest)}), calls=calls
    )
    atomic.sync_directory(directory.parent, calls=calls)
    return manifest


def read_manifest(directory: Path) -> Manifest:
    """Raises DamagedCheckpointError where it is missing or not whole, CheckpointError where another
    version of this program wrote it."""
    path = directory / MANIFEST
    values = _read(path, {"version": INTEGER})
    if values["version"] != VERSION:
        raise CheckpointError(
            f"{path} has version {values['version']}, this program reads {VERSION}"
        )
    if problem := wrong(values, _FIELDS, _FIELDS):
        raise DamagedCheckpointError(f"{path} {problem}", directory.name)
    files = tuple(SavedFile(**{name: file[name] for name in _FILE}) for file in values["files"])
    return Manifest(values["step"], files)


def read_state(directory: Path) -> dict[str, Any]:
    """The state that ``write_manifest`` was given. Raises DamagedCheckpointError."""
    return _read(directory / STATE, {})


def verify(directory: Path, *, checksums: bool = True) -> Manifest:
    """Check every file's size and, unless told not to, its checksum (that of the state always).

    Raises DamagedCheckpointError with everything that is wrong.
    """
    manifest = read_manifest(directory)
    _check(directory, manifest.files, checksums)
    return manifest


def verify_share(directory: Path, rank: int, ranks: int) -> None:
    """Check one of ``ranks`` equal shares of the files: together the ranks read each file once.

    Raises DamagedCheckpointError.
    """
    _check(directory, read_manifest(directory).files[rank::ranks], True)


def open_verified(directory: Path, role: str) -> RoleCheckpoint:
    """A role, once the sizes and checksums of all its files (and of the state) are right.

    Raises DamagedCheckpointError, CheckpointError for a role that the checkpoint does not hold.
    """
    files = {file.name: file for file in read_manifest(directory).files}
    names = [name for rank in range(len(files)) if (name := file_name(role, rank)) in files]
    if not names:
        raise CheckpointError(f"checkpoint {directory} has no files of '{role}'")
    _check(directory, [files[name] for name in (STATE, *names) if name in files], True)
    weights = RoleCheckpoint(directory, role)
    if weights.ranks != len(names):
        message = f"{directory / MANIFEST} names {len(names)} of {weights.ranks} files of '{role}'"
        raise DamagedCheckpointError(message, directory.name)
    return weights


def _check(directory: Path, files: Iterable[SavedFile], checksums: bool) -> None:
    found = (_problem(directory, file, checksums or file.name == STATE) for file in files)
    problems = [problem for problem in found if problem]
    if problems:
        raise DamagedCheckpointError(
            f"checkpoint {directory}: " + "; ".join(problems), directory.name
        )


def _problem(directory: Path, file: SavedFile, checksums: bool) -> str:
    """Opened before it is judged: NFS looks at a file's size anew then."""
    path = directory / file.name
    try:
        with os.fdopen(REAL.open(path, os.O_RDONLY), "rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            if size != file.size:
                return f"{file.name} has {size} bytes instead of {file.size}"
            if checksums and checksum(opened) != file.checksum:
                return f"{file.name} has another checksum"
    except FileNotFoundError:
        return f"{file.name} is missing"
    except OSError as error:
        if error.errno not in UNREADABLE:
            raise explain(error, "read", path) from error
        return f"{file.name} cannot be read: {error.strerror}"
    return ""


def _json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=1) + "\n").encode()


def _read(path: Path, fields: Fields) -> dict[str, Any]:
    try:
        return documents.read(path, fields, fields)
    except FileNotFoundError as error:
        raise DamagedCheckpointError(f"{path} does not exist", path.parent.name) from error
    except CorruptFileError as error:
        raise DamagedCheckpointError(str(error), path.parent.name) from error
    except EnvironmentFailure as error:
        if cause(error) not in UNREADABLE:
            raise
        raise DamagedCheckpointError(str(error), path.parent.name) from error
