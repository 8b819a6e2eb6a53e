"""List, verify and remove the weight versions of a trial.

Only versions that no reader needs are removed.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from slurmrl.errors import CorruptFileError, EnvironmentFailure, WeightVersionError
from slurmrl.fsio import atomic
from slurmrl.fsio.calls import REAL, SystemCalls, explain
from slurmrl.tensors.weights.format import (
    MANIFEST,
    VersionId,
    VersionManifest,
    read_manifest,
    version_ids,
)
from slurmrl.tensors.weights.local_copy import VersionFiles

COMPLETE = "complete"
UNFINISHED = "unfinished"
BROKEN = "broken"


@dataclass(frozen=True)
class StoredVersion:
    """A version with a directory, published or not."""

    version: str
    step: int
    incarnation: int
    state: str
    """``complete``, ``broken``, or ``unfinished``. An unfinished version has no manifest: ranks are
    still writing, or have stopped."""
    bytes: int
    """Size of the files in bytes."""
    time: float | None = None
    """Time of publication in seconds since the epoch, by the publisher's clock. This field and the
    following fields are None if the manifest cannot be read."""
    base: str | None = None
    """Base version of the deltas; None for a full version."""
    tensors: int | None = None
    chain: int | None = None
    """Number of versions that a host without a copy must read; 1 for a full version."""
    frozen: str | None = None
    """Fingerprint of the frozen weights to which a version of adapters belongs."""
    problem: str | None = None


def inventory(
    versions: Path, *, verify: bool = False, calls: SystemCalls = REAL
) -> list[StoredVersion]:
    """Return all versions in a directory, from old to new.

    Sizes of files and bases are always checked. With ``verify``, stored bytes are also checked. A
    version that is removed during the listing is omitted. Raises EnvironmentFailure if the
    directory or a version cannot be read.
    """
    found: dict[str, StoredVersion] = {}
    with VersionFiles(versions, calls=calls) as files:
        for version in version_ids(versions, calls=calls):
            try:
                one = _look(versions, version, files, found, verify, calls)
            except FileNotFoundError:
                continue
            found[one.version] = one
    return list(found.values())


def _look(
    versions: Path,
    version: VersionId,
    files: VersionFiles,
    older: dict[str, StoredVersion],
    verify: bool,
    calls: SystemCalls,
) -> StoredVersion:
    """Return the facts about a version. Raises FileNotFoundError if its directory is gone."""
    folder = versions / version.name
    sizes = _sizes(folder, calls)
    size = sum(sizes.values())
    place = version.name, version.step, version.incarnation
    if MANIFEST not in sizes:
        return StoredVersion(*place, UNFINISHED, size)
    try:
        manifest = files.manifest(version)
    except (WeightVersionError, CorruptFileError) as error:
        _sizes(folder, calls)
        return StoredVersion(*place, BROKEN, size, problem=str(error))
    base = None if manifest.base is None else older.get(manifest.base)
    problem = _problem(manifest, sizes, base)
    if problem is None and verify:
        problem = _damage(manifest, files)
    if problem is not None:
        _sizes(folder, calls)
    return StoredVersion(
        *place,
        COMPLETE if problem is None else BROKEN,
        size,
        manifest.time,
        manifest.base,
        len(manifest.tensors),
        _chain(manifest, base),
        manifest.frozen,
        problem,
    )


def _sizes(folder: Path, calls: SystemCalls) -> dict[str, int]:
    """Return the sizes of a directory's files. Raises FileNotFoundError, EnvironmentFailure."""
    names = atomic.list_names(folder, calls=calls)
    try:
        return {name: calls.stat(folder / name).st_size for name in names}
    except FileNotFoundError:
        raise
    except OSError as error:
        raise explain(error, "read", folder) from error


def _problem(
    manifest: VersionManifest, sizes: dict[str, int], base: StoredVersion | None
) -> str | None:
    for file in manifest.files:
        if file.name not in sizes:
            return f"{file.name} is missing"
        if sizes[file.name] != file.size:
            return f"{file.name} has {sizes[file.name]} bytes instead of {file.size}"
    if manifest.base is None:
        return None
    if base is None:
        return f"its base {manifest.base} is missing"
    return None if base.state == COMPLETE else f"its base {manifest.base} is {base.state}"


def _chain(manifest: VersionManifest, base: StoredVersion | None) -> int | None:
    if manifest.base is None:
        return 1
    return None if base is None or base.chain is None else base.chain + 1


def _damage(manifest: VersionManifest, files: VersionFiles) -> str | None:
    try:
        for tensor in manifest.tensors:
            if tensor.file:
                files.stored(manifest.id, tensor)
    except (WeightVersionError, EnvironmentFailure) as error:
        return str(error)
    return None


REMOVED = "removed-"
"""Prefix of the names of directories during their removal."""


def superseded(
    known: Iterable[VersionId], published: Sequence[VersionManifest], keep_whole: int
) -> list[VersionId]:
    """Return the ``known`` versions that may be removed, from old to new.

    The ``keep_whole`` newest full versions are kept, and all versions later than the oldest of
    them, even unpublished versions. The bases of kept deltas are also kept.
    """
    whole = sorted(one.id for one in published if one.base is None)
    if not whole:
        return []
    oldest = whole[-keep_whole:][0]
    bases = {one.id: one.base for one in published}
    kept = {version for version in known if not version < oldest}
    for version in list(kept):
        while (base := bases.get(version)) is not None:
            version = VersionId.parse(base)
            kept.add(version)
    return sorted(set(known) - kept)


def prune(versions: Path, keep_whole: int, *, calls: SystemCalls = REAL) -> list[VersionId]:
    """Remove the `superseded` versions of a directory; return them.

    Raises EnvironmentFailure; the next call then removes the remaining files.
    """
    known = version_ids(versions, calls=calls)
    published = []
    for version in known:
        with suppress(WeightVersionError):  # The version is unfinished or damaged.
            published.append(read_manifest(versions / version.name, calls=calls))
    old = superseded(known, published, keep_whole)
    for version in reversed(old):  # A kill must not leave a version without its base.
        remove(versions, version, calls=calls)
    _sweep(versions, calls)
    return old


def remove(versions: Path, version: VersionId, *, calls: SystemCalls = REAL) -> None:
    """Remove a version, published or not; do nothing if it does not exist.

    Rename its directory first, so that readers find a missing version instead of an incomplete one.
    Raises EnvironmentFailure.
    """
    folder, aside = versions / version.name, versions / f"{REMOVED}{version}"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        calls.rename(folder, aside)
    except FileNotFoundError:
        return
    except OSError as error:
        raise explain(error, "remove", folder) from error
    atomic.sync_directory(versions, calls=calls)
    shutil.rmtree(aside, ignore_errors=True)


def _sweep(versions: Path, calls: SystemCalls) -> None:
    """Remove directories that a killed process has renamed but not removed."""
    with suppress(FileNotFoundError, EnvironmentFailure):
        for name in atomic.list_names(versions, calls=calls):
            if name.startswith(REMOVED):
                shutil.rmtree(versions / name, ignore_errors=True)
