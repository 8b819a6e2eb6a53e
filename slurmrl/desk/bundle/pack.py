"""Writing a bundle."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO

import slurmrl
from slurmrl.desk.bundle.contents import Contents
from slurmrl.desk.bundle.manifest import CONFIG, MANIFEST, WHEELS, BundleManifest, Member
from slurmrl.errors import UsageError
from slurmrl.fsio import atomic, objects
from slurmrl.fsio.calls import REAL
from slurmrl.fsio.failures import explain
from slurmrl.fsio.primitives import discard, temporary_beside


def pack(contents: Contents, wheels: Iterable[Path], output: Path) -> BundleManifest:
    """Write a bundle, which is there once it is whole. Raises EnvironmentFailure, UsageError."""
    named = dict(contents.files) | {f"{WHEELS}/{wheel.name}": wheel for wheel in wheels}
    temporary = temporary_beside(output)
    try:
        with temporary.open("xb") as file:
            os.fchmod(file.fileno(), 0o600)
            with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
                members = [_add(archive, CONFIG, io.BytesIO(contents.config), len(contents.config))]
                members += [_add_file(archive, name, path) for name, path in named.items()]
                manifest = BundleManifest(slurmrl.__version__, tuple(members))
                text = json.dumps({**objects.to_json(manifest), "format": manifest.format})
                _add(archive, MANIFEST, io.BytesIO(text.encode()), len(text))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(output)
        atomic.sync_directory(output.parent)
    except OSError as error:
        raise explain(error, "write", output) from error
    finally:
        discard(temporary, REAL)
    return manifest


def _add_file(archive: tarfile.TarFile, name: str, path: Path) -> Member:
    try:
        with path.open("rb") as file:
            return _add(archive, name, file, os.fstat(file.fileno()).st_size, path)
    except OSError as error:
        if error.filename is None:  # of the archive
            raise
        raise explain(error, "read", path) from error


def _add(
    archive: tarfile.TarFile, name: str, file: IO[bytes], size: int, path: Path | None = None
) -> Member:
    """Write a member without owner, time and mode of its file.

    Raises UsageError if the file becomes shorter or longer meanwhile.
    """
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o600
    read = _Digest(file)
    try:
        archive.addfile(info, read)
    except OSError as error:
        if "unexpected end of data" not in str(error):
            raise
        raise UsageError(f"{path} became shorter while it was read; try again") from error
    if file.read(1):
        raise UsageError(f"{path} became longer while it was read; try again")
    return Member(name, size, read.sha256.hexdigest())


class _Digest(io.RawIOBase):
    """Reads a file and takes the checksum of what was read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.sha256.update(data)
        return data
