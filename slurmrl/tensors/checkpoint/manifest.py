"""The manifest of a checkpoint directory: its files with their sizes and checksums. Torch-free.

A checkpoint exists once the history names it, which happens after its manifest is on disk.

Other trials read pinned checkpoints. A pinned checkpoint is a model folder whose weights are hard
links to the ranks' files of one role. The folder takes no space while the checkpoint exists. The
links keep the files if their trial deletes the checkpoint. The folder also has a manifest, like a
checkpoint, and ``origin.json``.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, TypeVar

from slurmrl import log
from slurmrl.backoff import HIDDEN_PAUSES_S, attempts
from slurmrl.errors import (
    CheckpointError,
    CorruptFileError,
    DamagedCheckpointError,
    EnvironmentFailure,
)
from slurmrl.fsio import atomic, documents
from slurmrl.fsio.atomic import is_absent, known_names
from slurmrl.fsio.calls import NO_FILE, REAL, SystemCalls, cause, explain, write_new
from slurmrl.fsio.documents import (
    FILE_NAME,
    INTEGER,
    SIZE,
    TEXT,
    Fields,
    list_of,
    one_of,
    shown,
    table,
    wrong,
)
from slurmrl.tensors.checkpoint.shards import RoleCheckpoint, file_name, layout_name
from slurmrl.tensors.checkpoint.tensors import SavedFile, checksum, kind_of

MANIFEST = "manifest.json"
STATE = "state.json"
VERSION = 2
"""Version of checkpoints. Version 1 had SHA-256 checksums, and a role's layout in all its files."""
ORIGIN: Final = "origin.json"
ORIGIN_VERSION: Final = 1
logger = log.get(__name__)
T = TypeVar("T")

_FILE: Fields = {"name": FILE_NAME, "size": SIZE, "checksum": TEXT}
_FIELDS: Fields = {"version": INTEGER, "step": INTEGER, "files": list_of(table(_FILE, _FILE))}


class _Problem(NamedTuple):
    text: str
    may_pass: bool = False
    """Whether a stale cache or a file server with I/O errors could cause the problem."""


@dataclass(frozen=True)
class Manifest:
    step: int
    files: tuple[SavedFile, ...]


def write_manifest(
    directory: Path,
    *,
    step: int,
    files: Iterable[SavedFile],
    state: Mapping[str, Any],
    calls: SystemCalls = REAL,
) -> Manifest:
    """Write ``state.json`` and then ``manifest.json``; sync both files and the directory.

    ``files`` are the ranks' files; ``state`` is everything else that a run needs to continue.
    Raises EnvironmentFailure.
    """
    text = _json(state)
    atomic.replace(directory / STATE, text, calls=calls)
    own = SavedFile(STATE, len(text), checksum(BytesIO(text)))
    manifest = Manifest(step, (*files, own))
    write_listing(directory, manifest, calls=calls)
    atomic.sync_directory(directory.parent, calls=calls)
    return manifest


def write_listing(directory: Path, manifest: Manifest, *, calls: SystemCalls = REAL) -> None:
    """Write only ``manifest.json``, durably. Raises EnvironmentFailure."""
    text = _json({"version": VERSION, **asdict(manifest)})
    atomic.replace(directory / MANIFEST, text, calls=calls)


def read_manifest(directory: Path) -> Manifest:
    """Return the manifest of a checkpoint.

    Raises:
    - DamagedCheckpointError if the manifest is missing or incomplete;
    - CheckpointError if another version of slurmrl wrote it;
    - EnvironmentFailure if it cannot be read.
    """
    path = directory / MANIFEST
    values = _read(path, {"version": INTEGER}, ("version",))
    if not 1 <= values["version"] <= VERSION:
        raise CheckpointError(
            f"{path} has version {values['version']}; this program reads versions 1 to {VERSION}"
        )
    if problem := wrong(values, _FIELDS, _FIELDS):
        raise DamagedCheckpointError(f"{path} {problem}", directory.name)
    files = tuple(SavedFile(**{name: file[name] for name in _FILE}) for file in values["files"])
    return Manifest(values["step"], files)


def read_state(
    directory: Path, fields: Fields | None = None, required: Collection[str] = ()
) -> dict[str, Any]:
    """Return the state that ``write_manifest`` wrote.

    Raises DamagedCheckpointError if the state is damaged or if fields do not have the types in
    ``fields``, and EnvironmentFailure.
    """
    return _read(directory / STATE, fields or {}, required)


def verify(directory: Path, *, checksums: bool = True) -> Manifest:
    """Check the sizes of all files and, unless ``checksums`` is false, their checksums.

    The checksum of the state is always checked.

    Raises DamagedCheckpointError with all problems. A file is damaged if it is readable and wrong,
    or missing from a directory that can be listed. Raises EnvironmentFailure for other files that
    cannot be read.
    """
    manifest = read_manifest(directory)
    _check(directory, manifest.files, checksums)
    return manifest


def verify_share(directory: Path, rank: int, ranks: int) -> None:
    """Verify one of ``ranks`` equal shares of the files. All ranks together read each file once.

    Raises as `verify`.
    """
    _check(directory, read_manifest(directory).files[rank::ranks], True)


def until_certain(check: Callable[[], T], sleep: Callable[[float], None] = time.sleep) -> T:
    """Return the result of ``check``. Repeat the check while damage may be temporary.

    After about a minute, raise the error of ``check``.
    """
    for last in attempts(HIDDEN_PAUSES_S, sleep):
        try:
            return check()
        except DamagedCheckpointError as error:
            if last or not error.may_pass:
                raise
            logger.warning("%s; slurmrl will check it again", error)
    raise AssertionError("unreachable: the last attempt returns or raises")


def open_verified(directory: Path, role: str) -> RoleCheckpoint:
    """Open a role after verifying sizes and checksums of its files and of the state.

    Raises DamagedCheckpointError, and CheckpointError if the checkpoint does not have the role.
    """
    files = {file.name: file for file in read_manifest(directory).files}
    names = [name for rank in range(len(files)) if (name := file_name(role, rank)) in files]
    if not names:
        raise CheckpointError(f"checkpoint {directory} has no files of '{role}'")
    needed = (STATE, layout_name(role), *names)
    _check(directory, [files[name] for name in needed if name in files], True)
    weights = RoleCheckpoint(directory, role)
    if weights.ranks != len(names):
        message = f"{directory / MANIFEST} lists {len(names)} of {weights.ranks} files of '{role}'"
        raise DamagedCheckpointError(message, directory.name)
    return weights


def _check(directory: Path, files: Iterable[SavedFile], checksums: bool) -> None:
    found = (_problem(directory, file, checksums or file.name == STATE) for file in files)
    problems = [problem for problem in found if problem is not None]
    if problems:
        text = "; ".join(problem.text for problem in problems)
        may_pass = all(problem.may_pass for problem in problems)
        raise DamagedCheckpointError(f"checkpoint {directory}: {text}", directory.name, may_pass)


def _problem(directory: Path, file: SavedFile, checksums: bool) -> _Problem | None:
    """Return the problem of a file; None for an intact file."""
    path = directory / file.name
    try:
        # Open the file before reading its size: NFS then updates the size.
        with os.fdopen(REAL.open(path, os.O_RDONLY), "rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            if size != file.size:
                text = f"{file.name} has {size} bytes instead of {file.size}"
                return _Problem(text, REAL.caches(directory))
            if not checksums:
                return None
            kind = kind_of(file.checksum)
            if kind is None:
                return _Problem(f"{file.name} has the unknown checksum {shown(file.checksum)}")
            if checksum(opened, kind) != file.checksum:
                return _Problem(f"{file.name} has another checksum")
    except OSError as error:
        problem = _damage_of(path, error.errno or 0)
        if problem is None:
            raise explain(error, "read", path) from error
        return problem
    return None


def _damage_of(path: Path, number: int) -> _Problem | None:
    """Return the damage of a file that could not be read.

    Return None if the file may be intact, because its mount is missing or does not answer.
    """
    if number in NO_FILE:
        return _Problem(f"{path.name} cannot be read: it is {NO_FILE[number]}")
    if number == errno.ENOENT and any(map(is_absent, (path, path.parent))):
        return _Problem(f"{path.name} is missing", REAL.caches(path.parent.parent))
    if number == errno.EIO and known_names(path.parent) is not None:
        return _Problem(f"{path.name} cannot be read: {os.strerror(number)}", True)
    return None


def _json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=1) + "\n").encode()


def _read(path: Path, fields: Fields, required: Collection[str]) -> dict[str, Any]:
    """Return a checkpoint's JSON file. Raises DamagedCheckpointError, EnvironmentFailure."""
    try:
        return documents.read(path, fields, required)
    except CorruptFileError as error:
        raise DamagedCheckpointError(str(error), path.parent.name) from error
    except FileNotFoundError as error:
        failure = explain(error, "read", path)
        raise _damaged(path, errno.ENOENT) or failure from error
    except EnvironmentFailure as error:
        raise _damaged(path, cause(error)) or error from error.__cause__


def _damaged(path: Path, number: int) -> DamagedCheckpointError | None:
    problem = _damage_of(path, number)
    if problem is None:
        return None
    text = f"checkpoint {path.parent}: {problem.text}"
    return DamagedCheckpointError(text, path.parent.name, problem.may_pass)


@dataclass(frozen=True, kw_only=True)
class PinnedOrigin:
    """The origin of a pinned checkpoint's files."""

    version: Annotated[int, INTEGER]
    trial: str
    step: Annotated[int, SIZE]
    role: str
    implementation: Annotated[str, one_of("builtin", "hf")]
    head: Annotated[str, one_of("lm", "value")]
    base: str | None = None
    """Model folder to which the adapters belong; None without adapters."""
    lora: Mapping[str, Any] | None = None
    """Settings of the adapters; None without adapters."""
    dtype: str | None = None
    """Data type of the weights with which the adapters were trained; None in older folders."""


def is_pinned(folder: Path) -> bool:
    return (folder / ORIGIN).is_file()


def read_origin(folder: Path) -> PinnedOrigin:
    """Return the origin of a pinned checkpoint.

    Raises CheckpointError, CorruptFileError, EnvironmentFailure.
    """
    path = folder / ORIGIN
    values = documents.read(path, {"version": INTEGER}, ("version",))
    if values["version"] != ORIGIN_VERSION:
        message = (
            f"{path} has version {values['version']}; this program reads version {ORIGIN_VERSION}"
        )
        raise CheckpointError(message)
    return documents.from_json(PinnedOrigin, values, path)


def pin(checkpoint: Path, origin: PinnedOrigin, folder: Path, calls: SystemCalls = REAL) -> None:
    """Add the links, the manifest and the origin to a folder, durably.

    Raises DamagedCheckpointError, EnvironmentFailure, OSError.
    """
    manifest = read_manifest(checkpoint)
    files = tuple(file for file in manifest.files if file.name.startswith(f"{origin.role}."))
    for file in files:
        calls.link(checkpoint / file.name, folder / file.name)
    write_listing(folder, Manifest(manifest.step, files), calls=calls)
    text = json.dumps(documents.to_json(origin), indent=1) + "\n"
    write_new(folder / ORIGIN, text.encode(), True, calls)
