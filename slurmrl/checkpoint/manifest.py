"""The manifest of a checkpoint directory: which files belong to it, with sizes and checksums.

A checkpoint exists once the history names it, which happens after its manifest is on disk.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slurmrl.checkpoint.tensors import SavedFile, checksum
from slurmrl.errors import CheckpointError, CorruptFileError
from slurmrl.fsio import atomic, documents
from slurmrl.fsio.calls import REAL, SystemCalls

MANIFEST = "manifest.json"
STATE = "state.json"
VERSION = 1


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
    """Raises CheckpointError where it is missing or not ours."""
    values = _read(directory / MANIFEST)
    try:
        if values["version"] != VERSION:
            raise CheckpointError(
                f"{directory / MANIFEST} has version {values['version']}, this program reads "
                f"{VERSION}"
            )
        return Manifest(values["step"], tuple(SavedFile(**file) for file in values["files"]))
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{directory / MANIFEST} is not a manifest: {error!r}") from error


def read_state(directory: Path) -> dict[str, Any]:
    """The state that ``write_manifest`` was given."""
    return _read(directory / STATE)


def verify(directory: Path, *, checksums: bool = True) -> Manifest:
    """Check every file's size and, unless told not to, its checksum.

    Raises CheckpointError with everything that is wrong.
    """
    manifest = read_manifest(directory)
    found = (_problem(directory, file, checksums) for file in manifest.files)
    problems = [problem for problem in found if problem]
    if problems:
        raise CheckpointError(f"checkpoint {directory}: " + "; ".join(problems))
    return manifest


def _problem(directory: Path, file: SavedFile, checksums: bool) -> str:
    path = directory / file.name
    if not path.is_file():
        return f"{file.name} is missing"
    size = path.stat().st_size
    if size != file.size:
        return f"{file.name} has {size} bytes instead of {file.size}"
    if checksums and checksum(path) != file.checksum:
        return f"{file.name} has another checksum"
    return ""


def _json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=1) + "\n").encode()


def _read(path: Path) -> dict[str, Any]:
    try:
        return documents.read(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist") from error
    except CorruptFileError as error:
        raise CheckpointError(str(error)) from error
