"""The format of bundles, and their unpacking.

A bundle is a tar archive of regular files, for a cluster without a network. A bundle contains the
configuration (with paths inside the bundle), the user's own code, the files of models and datasets
below `INPUTS`, and wheels below `WHEELS`. The last member is `MANIFEST`, with the size and checksum
of every other member. The same inputs make the same bytes. Each member of an archive is checked
before it is used.
"""

from __future__ import annotations

import hashlib
import shutil
import tarfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Final

from slurmrl import log
from slurmrl.env import user_name
from slurmrl.errors import CorruptFileError, EnvironmentFailure, UsageError
from slurmrl.fsio import atomic, calls, documents
from slurmrl.fsio.calls import REAL, explain, write_new_parts
from slurmrl.fsio.documents import COUNT, SIZE

logger = log.get(__name__)

BUNDLES: Final = ".bundles"
"""Folder of unpacked bundles, next to the experiments. Names of experiments begin with no dot."""
DIGEST_CHARACTERS: Final = 16
CHUNK_BYTES: Final = 4 << 20
REGULAR: Final = (tarfile.REGTYPE, tarfile.AREGTYPE)
MANIFEST: Final = "bundle.json"
CONFIG: Final = "config.yaml"
INPUTS: Final = "input-files"
WHEELS: Final = "wheel-files"
"""Folders of inputs and wheels. The user's modules, which are next to them, cannot have a dash in
their names."""
FORMAT: Final = 1
MANIFEST_BYTES: Final = 64 << 20
MOST_FILES: Final = 200_000
LONGEST_NAME: Final = 1000


@dataclass(frozen=True)
class Member:
    """A file of a bundle."""

    name: str
    bytes: Annotated[int, SIZE]
    sha256: str


@dataclass(frozen=True)
class BundleManifest:
    slurmrl: str
    """The version that made the bundle."""
    files: tuple[Member, ...]
    format: Annotated[int, COUNT] = FORMAT

    @property
    def unpacked(self) -> tuple[Member, ...]:
        """Files that a trial needs: all except the wheels."""
        return tuple(one for one in self.files if not one.name.startswith(f"{WHEELS}/"))


def unpack(path: Path, root: Path) -> Path:
    """Return the configuration in a bundle's folder below ``root``; make the folder if missing.

    The folder appears once it is complete and its checksums are right.

    Raises EnvironmentFailure, and UsageError if the file is not a complete bundle.
    """
    bundles = root / user_name() / BUNDLES
    with _opened(path) as archive:
        members = _members(archive, path)
        manifest, digest = _manifest(archive, members, path)
        folder = bundles / digest
        if folder.exists():
            _check_unpacked(folder, manifest)
            return folder / CONFIG
        _require_space(bundles, manifest)
        part = bundles / f".part-{digest}-{uuid.uuid4().hex}"
        try:
            _extract(archive, members, manifest, part, path)
            _publish(part, folder)
        except (OSError, EnvironmentFailure):
            if not folder.exists():  # Another process may have made the folder.
                raise
        finally:
            shutil.rmtree(part, ignore_errors=True)
        _check_unpacked(folder, manifest)
    for left in bundles.glob(f".part-{digest}-*"):  # Killed processes left these folders.
        shutil.rmtree(left, ignore_errors=True)
    logger.info("unpacked %s into %s", path, folder)
    return folder / CONFIG


def is_safe(name: str) -> bool:
    """Return whether a name is printable and stays below the folder of the unpacked bundle."""
    parts = PurePosixPath(name).parts
    return (
        0 < len(name) <= LONGEST_NAME
        and name.isprintable()
        and "\\" not in name
        and "/".join(parts) == name
        and not name.startswith("/")
        and ".." not in parts
        and all(len(part.encode()) <= 255 for part in parts)
    )


@contextmanager
def _opened(path: Path) -> Iterator[tarfile.TarFile]:
    try:
        with tarfile.open(path, mode="r:", errorlevel=2) as archive:
            yield archive
    except (UsageError, EnvironmentFailure):
        raise
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise _incomplete(path, str(error)) from error
    except OSError as error:
        raise explain(error, "read", path) from error


def _members(archive: tarfile.TarFile, path: Path) -> dict[str, tarfile.TarInfo]:
    """Return a mapping from names to the archive's members.

    Raises UsageError for a member that is no regular file or has an unsafe name (see `is_safe`).
    """
    found: dict[str, tarfile.TarInfo] = {}
    for member in archive:
        shown = repr(member.name[:80])
        if member.type not in REGULAR or member.sparse is not None:
            raise UsageError(f"cannot unpack {path}: {shown} is not a regular file")
        if not is_safe(member.name):
            raise UsageError(f"cannot unpack {path}: {shown} is not allowed as a name")
        if member.name in found:
            raise UsageError(f"cannot unpack {path}: it contains {shown} twice")
        if len(found) == MOST_FILES:
            raise UsageError(f"cannot unpack {path}: it contains more than {MOST_FILES} files")
        found[member.name] = member
    for name in found:
        if above := [str(one) for one in Path(name).parents if str(one) in found]:
            raise UsageError(f"cannot unpack {path}: {above[0]!r} is both a file and a folder")
    return found


def _manifest(
    archive: tarfile.TarFile, members: dict[str, tarfile.TarInfo], path: Path
) -> tuple[BundleManifest, str]:
    """Return the manifest of the bundle and its digest.

    Raises UsageError if names or sizes of members differ from the manifest.
    """
    if MANIFEST not in members:
        raise _incomplete(path, f"it has no {MANIFEST}, the last file of each bundle")
    if members[MANIFEST].size > MANIFEST_BYTES:
        size = members[MANIFEST].size
        raise UsageError(
            f"cannot unpack {path}: {MANIFEST} has {size} bytes; the maximum is {MANIFEST_BYTES}"
        )
    text = b"".join(_read(archive, members[MANIFEST]))
    try:
        values = documents.parse(text, path)
        manifest = documents.from_json(BundleManifest, values, path, remedy="copy it again")
    except CorruptFileError as error:
        raise UsageError(str(error)) from error
    if manifest.format != FORMAT:
        raise UsageError(
            f"{path} has format {manifest.format}, but this slurmrl reads format {FORMAT}: make "
            f"the bundle again, or use slurmrl {manifest.slurmrl}"
        )
    stated = {one.name: one.bytes for one in manifest.files}
    there = {name: one.size for name, one in members.items() if name != MANIFEST}
    wrong = sorted(
        name for name in stated.keys() | there.keys() if stated.get(name) != there.get(name)
    )
    if wrong or len(stated) != len(manifest.files) or CONFIG not in stated:
        raise _incomplete(path, f"{(wrong or [CONFIG])[0]} differs from {MANIFEST}")
    return manifest, hashlib.sha256(text).hexdigest()[:DIGEST_CHARACTERS]


def _extract(
    archive: tarfile.TarFile,
    members: dict[str, tarfile.TarInfo],
    manifest: BundleManifest,
    part: Path,
    path: Path,
) -> None:
    """Write the files that a trial needs into the new folder ``part``.

    The folder only gets regular files, so no name can lead out of it through a link.
    """
    atomic.make_private_directory(part)
    for stated in manifest.unpacked:
        target = part / stated.name
        atomic.make_private_directory(target.parent)
        data = _verified(archive, members[stated.name], stated, path)
        try:
            write_new_parts(target, data, True, REAL)
        except OSError as error:
            raise explain(error, "write", target) from error


def _verified(
    archive: tarfile.TarFile, member: tarfile.TarInfo, stated: Member, path: Path
) -> Iterator[bytes]:
    found = hashlib.sha256()
    for data in _read(archive, member):
        found.update(data)
        yield data
    if found.hexdigest() != stated.sha256:
        raise _incomplete(path, f"{stated.name} has another checksum")


def _read(archive: tarfile.TarFile, member: tarfile.TarInfo) -> Iterator[bytes]:
    """Yield the content of a member. Raises tarfile.ReadError if the archive is incomplete."""
    file = archive.extractfile(member)
    assert file is not None, "only regular files are read"
    while data := file.read(CHUNK_BYTES):
        yield data


def _publish(part: Path, folder: Path) -> None:
    for directory in {path.parent for path in part.rglob("*")}:
        atomic.sync_directory(directory)
    try:
        part.rename(folder)
    except OSError as error:
        raise explain(error, "write", folder) from error
    atomic.sync_directory(folder.parent)


def _check_unpacked(folder: Path, manifest: BundleManifest) -> None:
    """Check the folder of a bundle that was unpacked earlier.

    Raises OwnershipError if other users could change its files, UsageError if files are missing or
    have other sizes.
    """
    for warning in atomic.check_ownership(folder):
        logger.warning("%s", warning)
    for stated in manifest.unpacked:
        target = folder / stated.name
        if not target.is_file() or target.stat().st_size != stated.bytes:
            raise UsageError(
                f"{folder}, into which this bundle was unpacked earlier, is damaged: "
                f"{stated.name} is missing or has a wrong size; remove the folder and submit again"
            )


def _require_space(bundles: Path, manifest: BundleManifest) -> None:
    existing = next(path for path in (bundles, *bundles.parents) if path.is_dir())
    needed = sum(one.bytes for one in manifest.unpacked)
    free = calls.free_bytes(existing)
    if free is not None and free < needed + calls.LEAST_BYTES:
        raise EnvironmentFailure(
            f"the bundle needs {needed >> 20} MiB, and {free >> 20} MiB are free on the file "
            f"system of {existing}; nothing was unpacked"
        )


def _incomplete(path: Path, why: str) -> UsageError:
    return UsageError(f"{path} is damaged or incomplete: {why}; copy it again")
