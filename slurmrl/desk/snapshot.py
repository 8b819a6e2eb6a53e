"""Snapshots of the code that a run executes.

``code/`` (and ``code.<n>/``, taken by ``resume --update-code``) holds this package, the user's own
code and a record of their origin. A snapshot is built under another name and then renamed. A
submission's request and batch script name its snapshot, so a job never sees parts of two.
"""

from __future__ import annotations

import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from slurmrl import package
from slurmrl.desk import copying, package_copy
from slurmrl.desk.own_code import OwnCode
from slurmrl.errors import EnvironmentFailure, UsageError
from slurmrl.fsio import atomic, documents
from slurmrl.fsio.shapes import COUNT
from slurmrl.run.paths import RunPaths
from slurmrl.watch.snapshot import submission_numbers

PACKAGE = "slurmrl"
MOST_COPIES = 3
"""Attempts to copy code that changes meanwhile."""
PAUSE_S = 1.0
"""Seconds between them."""
Record = Callable[[Path], None]
"""Writes the provenance record into a snapshot."""


def take(paths: RunPaths, code: OwnCode, record: Record) -> None:
    """Make the first snapshot, unless it exists."""
    if not _is_empty(paths.code):
        return
    copy = _build(paths, code, record)
    try:
        os.rename(copy, paths.code)  # over the empty folder that was made with the trial
    except OSError:
        shutil.rmtree(copy)
        if _is_empty(paths.code):
            raise
    atomic.sync_directory(paths.run)


def add(paths: RunPaths, code: OwnCode, record: Record) -> int:
    """Make another snapshot; return its number."""
    copy = _build(paths, code, record)
    number = following(paths)
    while True:
        try:
            os.rename(copy, paths.snapshot(number))
        except OSError:
            if not paths.snapshot(number).exists():
                shutil.rmtree(copy, ignore_errors=True)
                raise
            number += 1  # another process was first
            continue
        atomic.sync_directory(paths.run)
        return number


def current(paths: RunPaths) -> int:
    """Return the number of the snapshot that the newest submission runs."""
    for number in sorted(submission_numbers(paths), reverse=True):
        path = paths.submission_request(number)
        try:
            request = documents.read(path, {"snapshot": COUNT})
        except FileNotFoundError:
            continue
        snapshot: int = request.get("snapshot") or 1
        return snapshot
    return 1


def following(paths: RunPaths) -> int:
    """Return the number of the next snapshot."""
    return max(_numbers(paths)) + 1


def is_this_code(folder: Path) -> bool:
    """Return whether the slurmrl in a snapshot equals the running one byte for byte.

    True for a snapshot without slurmrl.
    """
    kept = folder / PACKAGE
    return not kept.is_dir() or package_copy.is_equal(kept)


def _build(paths: RunPaths, code: OwnCode, record: Record) -> Path:
    """Build a whole snapshot under a temporary name; remove it on failure.

    Raises UsageError if the code changes whenever it is copied (a checkout, a rebase): the snapshot
    would mix two versions.
    """
    sources: dict[Path, Collection[str]] = dict.fromkeys(code.paths, ())
    sources[package.FOLDER] = package_copy.NO_CODE
    changed: list[Path] = []
    for attempt in range(MOST_COPIES):
        if attempt:
            time.sleep(PAUSE_S)
        before = copying.stamps(sources)
        copy = paths.run / f".code.{uuid.uuid4().hex}"
        try:
            _fill(copy, code, record)
        except BaseException as error:
            shutil.rmtree(copy, ignore_errors=True)
            changed = _changed(before, sources)
            if not isinstance(error, EnvironmentFailure) or not changed:
                raise
            continue  # a file vanished while it was copied
        changed = _changed(before, sources)
        if not changed:
            return copy
        shutil.rmtree(copy)
    raise UsageError(
        f"the code changed while it was copied, {MOST_COPIES} times, last {changed[0]}: submit "
        "again once nothing writes there (a git checkout or rebase, an editor, a synchronisation)"
    )


def _fill(copy: Path, code: OwnCode, record: Record) -> None:
    atomic.make_private_directory(copy)
    package_copy.copy(copy / PACKAGE)
    for path in code.paths:
        copying.copy(path, copy / path.name)
    record(copy)


def _changed(
    before: Mapping[Path, tuple[int, ...]], sources: Mapping[Path, Collection[str]]
) -> list[Path]:
    """Return the files that differ from their stamps, appeared or vanished."""
    now = copying.stamps(sources)
    return sorted(path for path in before.keys() | now.keys() if before.get(path) != now.get(path))


def _numbers(paths: RunPaths) -> list[int]:
    matches = (re.fullmatch(r"code\.([0-9]{1,9})", name) for name in os.listdir(paths.run))
    return [1, *(int(match[1]) for match in matches if match)]


def _is_empty(folder: Path) -> bool:
    return not folder.is_dir() or not os.listdir(folder)
