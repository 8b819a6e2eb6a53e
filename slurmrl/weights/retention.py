"""Removal of the weight versions that no reader needs."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from slurmrl.errors import EnvironmentFailure, WeightVersionError
from slurmrl.fsio import atomic
from slurmrl.fsio.calls import REAL, SystemCalls
from slurmrl.fsio.failures import explain
from slurmrl.weights.records import read_manifest, version_ids
from slurmrl.weights.version import VersionId, VersionManifest

REMOVED = "removed-"
"""What the names of directories begin with that are being removed."""


def superseded(
    known: Iterable[VersionId], published: Sequence[VersionManifest], keep_whole: int
) -> list[VersionId]:
    """The versions, among those ``known``, that may be removed, from old to new.

    Kept are the ``keep_whole`` newest whole versions, everything later than the oldest of these,
    published or not, and what the differences among them are against.
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
    """Remove the `superseded` versions of a directory; return them. Raises EnvironmentFailure: what
    is left is removed the next time."""
    known = version_ids(versions, calls=calls)
    published = []
    for version in known:
        with suppress(WeightVersionError):  # unfinished or damaged
            published.append(read_manifest(versions / version.name, calls=calls))
    old = superseded(known, published, keep_whole)
    for version in reversed(old):  # a killed process leaves no version without its base
        remove(versions, version, calls=calls)
    _sweep(versions, calls)
    return old


def remove(versions: Path, version: VersionId, *, calls: SystemCalls = REAL) -> None:
    """Remove a version, published or not; does nothing if there is none.

    Its directory is renamed first: whoever reads it finds a missing version and not half of one.
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
    """Remove what a killed process has only renamed."""
    with suppress(FileNotFoundError, EnvironmentFailure):
        for name in atomic.list_names(versions, calls=calls):
            if name.startswith(REMOVED):
                shutil.rmtree(versions / name, ignore_errors=True)
