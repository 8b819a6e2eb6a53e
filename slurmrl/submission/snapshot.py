"""Snapshots of code: what a run was made of when it was submitted.

``code/`` (and ``code.<n>/``, taken by ``resume --update-code``) holds this package, the user's own
code and a record of where all of it came from. A snapshot is made beside its place and moved there
whole. Which one a submission runs is said by its request and by its batch script, so a job sees one
snapshot or another, and never parts of two.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

import slurmrl
from slurmrl.fsio import atomic, documents
from slurmrl.fsio.shapes import COUNT
from slurmrl.monitor.snapshot import submission_numbers
from slurmrl.paths import RunPaths
from slurmrl.submission import copying
from slurmrl.submission.own_code import OwnCode

PACKAGE = "slurmrl"
Record = Callable[[Path], None]
"""Writes into a snapshot what is to be remembered of it."""


def take(paths: RunPaths, code: OwnCode, record: Record) -> None:
    """Make the first snapshot; one that is there already stays."""
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
    """Make a further snapshot beside the others; returns its number."""
    copy = _build(paths, code, record)
    number = following(paths)
    while True:
        try:
            os.rename(copy, paths.snapshot(number))
        except OSError:
            if not paths.snapshot(number).exists():
                shutil.rmtree(copy, ignore_errors=True)
                raise
            number += 1  # somebody else was first
            continue
        atomic.sync_directory(paths.run)
        return number


def current(paths: RunPaths) -> int:
    """The snapshot that the newest submission runs."""
    for number in sorted(submission_numbers(paths), reverse=True):
        path = paths.submission_request(number)
        try:
            request = documents.read(path, {"snapshot": COUNT})
        except FileNotFoundError:
            continue
        found: int = request.get("snapshot") or 1
        return found
    return 1


def following(paths: RunPaths) -> int:
    """The number of the next snapshot."""
    return max(_numbers(paths)) + 1


def is_this_code(folder: Path) -> bool:
    """Whether the slurmrl in a snapshot is the one that runs here, byte for byte; so it is in one
    that holds none."""
    kept, here = folder / PACKAGE, Path(slurmrl.__file__).parent
    if not kept.is_dir() or kept.samefile(here):
        return True
    there = dict(copying.files(kept))
    ours = dict(copying.files(here))
    return there.keys() == ours.keys() and all(
        path.read_bytes() == ours[name].read_bytes() for name, path in there.items()
    )


def _build(paths: RunPaths, code: OwnCode, record: Record) -> Path:
    """A whole snapshot under a name that nobody looks at; taken back where it fails."""
    copy = paths.run / f".code.{uuid.uuid4().hex}"
    try:
        atomic.make_private_directory(copy)
        copying.copy(Path(slurmrl.__file__).parent, copy / PACKAGE)
        for path in code.paths:
            copying.copy(path, copy / path.name)
        record(copy)
    except BaseException:
        shutil.rmtree(copy, ignore_errors=True)
        raise
    return copy


def _numbers(paths: RunPaths) -> list[int]:
    found = (re.fullmatch(r"code\.([0-9]{1,9})", name) for name in os.listdir(paths.run))
    return [1, *(int(match[1]) for match in found if match)]


def _is_empty(folder: Path) -> bool:
    return not folder.is_dir() or not os.listdir(folder)
