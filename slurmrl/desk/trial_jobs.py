"""The jobs of a trial: cancel them, stop them after a commit, and remove trials without jobs."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from slurmrl.backoff import HIDDEN_PAUSES_S, attempts
from slurmrl.env import user_name
from slurmrl.errors import (
    CorruptFileError,
    EnvironmentFailure,
    SchedulerError,
    TrialEndedError,
    UsageError,
    WaitTimeoutError,
)
from slurmrl.fsio import atomic
from slurmrl.run.history.slots import History, Kind
from slurmrl.run.history.state import end, fold
from slurmrl.run.metrics import read_latest
from slurmrl.run.paths import RunPaths
from slurmrl.run.reports import TRAINERS
from slurmrl.scheduler import make
from slurmrl.scheduler.base import JobIds, JobState, Scheduler, TaskState
from slurmrl.scheduler.submission import newest_submission, request_stop, withdraw_stop

LEAVE_TIMEOUT_S = 60.0
"""Seconds that jobs without trainers may take to end after they were cancelled."""
STOP_POLL_S = 2.0
"""Seconds between two queries about the jobs of a trial that stops."""
ASIDE = ".removed-"
"""Prefix of a directory that is being removed. No trial has such a name."""


@dataclass(frozen=True)
class Jobs:
    """The job ids of each group of one submission, and their scheduler."""

    number: int
    scheduler: Scheduler
    ids: JobIds

    def active(self) -> list[TaskState]:
        """Return the pending and running elements of the arrays."""
        return [task for task in self.scheduler.query(self.ids) if task.state.active]

    def trainers_run(self) -> bool:
        """Return whether a job of the trainers runs; only such a job commits."""
        return any(
            task.group == TRAINERS and task.state is JobState.RUNNING for task in self.active()
        )


def newest_jobs(paths: RunPaths) -> Jobs | None:
    """Return the jobs of the newest submission; None without a submission.

    Raises SchedulerError if the scheduler does not answer.
    """
    submission = newest_submission(paths)
    if submission is None:
        return None
    scheduler = make(submission.scheduler)
    return Jobs(submission.number, scheduler, scheduler.recover(paths, submission.number))


def clear_away(jobs: Jobs, sleep: Callable[[float], None] = time.sleep) -> None:
    """Cancel the remaining jobs of a trial without trainers, and wait until they are gone.

    Raises WaitTimeoutError with the jobs that remain.
    """
    if left := jobs.active():
        jobs.scheduler.cancel(jobs.ids)
    deadline = time.monotonic() + LEAVE_TIMEOUT_S
    while left:
        if time.monotonic() > deadline:
            names = ", ".join(f"{task.job_id} ({task.raw})" for task in left)
            raise WaitTimeoutError(
                f"jobs of an earlier submission have not ended within {LEAVE_TIMEOUT_S:.0f} s: "
                f"{names}; end them with scancel and try again"
            )
        sleep(0.1)
        left = jobs.active()


def uncommitted(paths: RunPaths) -> str:
    """Return ``steps 11 to 14``, the steps after the last commit of a trial that has not ended.

    Return "" without such steps. Raises CorruptFileError, EnvironmentFailure.
    """
    state, lines = fold(History(paths.history).read()), read_latest(paths.metrics, 1)
    if state.end is not None or not lines:
        return ""
    first = (state.last_commit.step if state.last_commit else 0) + 1
    last = lines[-1]["step"]
    if last <= first:
        return f"step {last}" if last == first else ""
    return f"steps {first} to {last}"


def cancel(paths: RunPaths) -> Kind:
    """Record the end in the history, then cancel the jobs.

    Return the kind of the trial's end, which is CANCELLED unless another end came first.

    The record comes first, so that a link exits if it starts before the jobs are cancelled.
    """
    try:
        end(History(paths.history), Kind.CANCELLED, {"reason": f"cancelled by {user_name()}"})
        kind = Kind.CANCELLED
    except TrialEndedError:
        before = fold(History(paths.history).read()).end
        kind = before.kind if before else Kind.CANCELLED
    jobs = newest_jobs(paths)
    if jobs is not None:
        jobs.scheduler.cancel(jobs.ids)
    from slurmrl.watch.overview import keep_overview  # Submissions do not need this module.

    keep_overview(paths)
    return kind


def stop(paths: RunPaths) -> Jobs:
    """Tell the running jobs of the newest submission to commit and exit; cancel its queued jobs.

    Return all jobs. Raises UsageError for a trial that has ended or has no job, SchedulerError.
    """
    name = paths.full_name
    end = fold(History(paths.history).read()).end
    if end is not None:
        raise UsageError(f"{name} has already ended: {end.kind}")
    jobs = newest_jobs(paths)
    if jobs is None or not jobs.active():
        raise UsageError(f"{name} has no jobs to stop; to continue it: slurmrl resume {name}")
    request_stop(paths, jobs.number, user_name())  # First: a link that starts now must exit.
    try:
        jobs.scheduler.interrupt(jobs.ids)
        if not jobs.trainers_run():
            jobs.scheduler.cancel(jobs.ids)
    except SchedulerError:
        withdraw_stop(paths, jobs.number)
        raise
    return jobs


def wait_until_stopped(
    paths: RunPaths, jobs: Jobs, sleep: Callable[[float], None] = time.sleep
) -> str:
    """Wait until the jobs have ended; return a description of the trial's state.

    Raises SchedulerError, WaitTimeoutError for jobs that remain after the trainers.
    """
    while any(task.group == TRAINERS for task in jobs.active()):
        sleep(STOP_POLL_S)
    clear_away(jobs, sleep)
    state = fold(History(paths.history).read())
    if state.end is not None:
        return f"has ended: {state.end.kind}"
    commit = state.last_commit
    return "is stopped, without a commit" if commit is None else f"is stopped at step {commit.step}"


def check_removable(chosen: Sequence[RunPaths], others: Sequence[RunPaths]) -> None:
    """Check that the ``chosen`` trials can be removed.

    Raise UsageError if a chosen trial has a job, or if the configuration of one of the ``others``
    names a file of a chosen trial. Raise SchedulerError if the scheduler does not answer.
    """
    for paths in chosen:
        jobs = newest_jobs(paths)
        if jobs is not None and (active := jobs.active()):
            names = ", ".join(f"{task.job_id} ({task.raw})" for task in active)
            name = paths.full_name
            raise UsageError(f"{name} still has jobs: {names}; first: slurmrl cancel {name}")
    for other in others:
        text = _configuration(other)
        for paths in chosen:
            if f"{paths.run}/" in text:
                raise UsageError(
                    f"{other.full_name} uses files of {paths.full_name} (see {other.config}); "
                    f"remove {other.full_name} first, or both in one command"
                )


def remove(paths: RunPaths) -> None:
    """Remove the directory of a trial, and its experiment's directory if this was the last trial.

    The trial disappears from all lists at once. If the removal is killed, the next removal in the
    experiment completes it. Raises EnvironmentFailure if the file system fails.
    """
    aside = paths.run.with_name(f"{ASIDE}{paths.trial}")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        paths.run.rename(aside)
        for left in paths.run.parent.glob(f"{ASIDE}*"):
            _complete_removal(left)
    except OSError as error:
        raise EnvironmentFailure(f"{error.filename}: {error.strerror}") from error
    with suppress(OSError):
        paths.run.parent.rmdir()


def _complete_removal(folder: Path) -> None:
    """Remove a folder that another removal may be removing too. Raises OSError."""
    for last in attempts(HIDDEN_PAUSES_S, time.sleep):
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:
            if last and folder.exists():
                raise
        if not folder.exists():
            return


def _configuration(paths: RunPaths) -> str:
    try:
        return atomic.read(paths.config).decode(errors="replace")
    except (FileNotFoundError, CorruptFileError):
        return ""
