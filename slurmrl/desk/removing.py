"""Removing the directories of trials that have no jobs."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress

from slurmrl.desk.live import newest_jobs
from slurmrl.errors import CorruptFileError, EnvironmentFailure, UsageError
from slurmrl.fsio import atomic
from slurmrl.run.paths import RunPaths

ASIDE = ".removed-"
"""Prefix of a directory that is being removed: no trial has such a name."""


def check(chosen: Sequence[RunPaths], others: Sequence[RunPaths]) -> None:
    """Check that the ``chosen`` trials can be removed.

    Raise UsageError if one of them has a job, or if the configuration of one of the ``others``
    names a file in it. Raise SchedulerError if the scheduler does not answer.
    """
    for paths in chosen:
        jobs = newest_jobs(paths)
        if jobs is not None and (active := jobs.active()):
            names = ", ".join(f"{task.job_id} ({task.raw})" for task in active)
            raise UsageError(
                f"{_name(paths)} still has jobs: {names}; first: slurmrl cancel {_name(paths)}"
            )
    for other in others:
        text = _configuration(other)
        for paths in chosen:
            if f"{paths.run}/" in text:
                raise UsageError(
                    f"{_name(other)} uses files of {_name(paths)} (see {other.config}); remove "
                    f"{_name(other)} first, or both in one command"
                )


def remove(paths: RunPaths) -> None:
    """Remove the directory of a trial, and that of its experiment if it is empty then.

    The trial vanishes from all lists at once; the rest of a removal that is killed is removed by
    the next one in its experiment. Raise EnvironmentFailure if the file system refuses.
    """
    aside = paths.run.with_name(f"{ASIDE}{paths.trial}")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        paths.run.rename(aside)
        for left in paths.run.parent.glob(f"{ASIDE}*"):
            shutil.rmtree(left)
    except OSError as error:
        raise EnvironmentFailure(f"{error.filename}: {error.strerror}") from error
    with suppress(OSError):
        paths.run.parent.rmdir()


def _configuration(paths: RunPaths) -> str:
    try:
        return atomic.read(paths.config).decode(errors="replace")
    except (FileNotFoundError, CorruptFileError):
        return ""


def _name(paths: RunPaths) -> str:
    return f"{paths.experiment}/{paths.trial}"
