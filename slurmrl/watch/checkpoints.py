"""Inventory of a trial's checkpoints, with the damage of each and the reasons to keep it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from slurmrl.config.load import load_resolved
from slurmrl.errors import CheckpointError, EnvironmentFailure
from slurmrl.run.history.slots import History, Kind, Record
from slurmrl.run.history.state import Commit, fold
from slurmrl.run.paths import RunPaths
from slurmrl.tensors.checkpoint.manifest import read_manifest, verify


@dataclass(frozen=True)
class StoredCommit:
    """A commit, or a damaged commit that was renamed for inspection and not removed yet."""

    step: int
    incarnation: int
    directory: str
    time: float
    """Time of the commit in seconds since the epoch, by the master's clock."""
    files: int
    bytes: int
    """Number of files and bytes; both are 0 if the manifest cannot be read."""
    kept_by: list[str]
    """Reasons to keep the commit, such as ``last`` and ``every`` (see `kept_by`)."""
    exported: bool
    """Whether the run has exported the commit's model."""
    problem: str | None
    """Damage of the commit's files, or the reason why they cannot be read; None if intact."""
    set_aside: bool = False
    """Whether the commit was renamed because it was damaged."""
    unreadable: bool = False
    """Whether the directory does not answer, so that damage is unknown."""


def inventory(paths: RunPaths, *, checksums: bool) -> list[StoredCommit]:
    """Return all checkpoints, sorted by step, and check the sizes of their files.

    With ``checksums``, also check the contents. Omit a checkpoint that the run deletes during the
    listing. Raises EnvironmentFailure if the history cannot be read.
    """
    records = History(paths.history).read()
    state = fold(records)
    times = {r.data["directory"]: r.time for r in records if r.kind is Kind.COMMIT}
    settings = load_resolved(paths.config).checkpoint
    reasons = kept_by(state.commits, settings.keep_last, settings.keep_every_steps)
    exported = {export.step for export in state.exports}
    stored = [_look(paths, commit, times, reasons, exported, checksums) for commit in state.commits]
    if any(each.problem for each in stored):
        left = {commit.directory for commit in fold(History(paths.history).read()).commits}
        stored = [each for each in stored if not each.problem or each.directory in left]
    return sorted([*stored, *_set_aside(paths, records, times)], key=lambda each: each.step)


def _look(
    paths: RunPaths,
    commit: Commit,
    times: dict[str, float],
    reasons: dict[str, list[str]],
    exported: set[int],
    checksums: bool,
) -> StoredCommit:
    directory = paths.checkpoints / commit.directory
    problem, unreadable, sizes = None, False, []
    try:
        sizes = [file.size for file in read_manifest(directory).files]
        verify(directory, checksums=checksums)
    except (CheckpointError, EnvironmentFailure) as error:
        problem, unreadable = str(error), isinstance(error, EnvironmentFailure)
    return StoredCommit(
        commit.step,
        commit.incarnation,
        commit.directory,
        times[commit.directory],
        len(sizes),
        sum(sizes),
        reasons[commit.directory],
        commit.step in exported,
        problem,
        unreadable=unreadable,
    )


def _set_aside(
    paths: RunPaths, records: list[Record], times: dict[str, float]
) -> list[StoredCommit]:
    """Return the damaged checkpoints that still exist. A run may remove them at any time."""
    damaged = []
    for record in records:
        if record.kind is Kind.DELETE and "reason" in record.data:
            directory = str(record.data["directory"])
            kept = paths.damaged_checkpoint(directory)
            with suppress(FileNotFoundError):
                sizes = [file.stat().st_size for file in kept.iterdir()]
                damaged.append(
                    StoredCommit(
                        record.data["step"],
                        record.incarnation,
                        kept.name,
                        times[directory],
                        len(sizes),
                        sum(sizes),
                        [],
                        False,
                        str(record.data["reason"]),
                        set_aside=True,
                    )
                )
    return damaged


def kept_by(
    commits: Sequence[Commit], keep_last: int, keep_every_steps: int | None
) -> dict[str, list[str]]:
    """Return the reasons to keep each directory; none if the directory may be removed.

    The reasons are ``last`` (one of the newest ``keep_last``) and ``every`` (the step is a multiple
    of ``keep_every_steps``). ``commits`` are in the order of their steps.
    """
    newest = {commit.directory for commit in commits[-keep_last:]}
    reasons: dict[str, list[str]] = {}
    for commit in commits:
        every = keep_every_steps is not None and commit.step % keep_every_steps == 0
        last = ["last"] if commit.directory in newest else []
        reasons[commit.directory] = last + (["every"] if every else [])
    return reasons
