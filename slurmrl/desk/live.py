"""The jobs of a trial's newest submission, and how they are cancelled."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from slurmrl.env import user_name
from slurmrl.errors import TrialEndedError, WaitTimeoutError
from slurmrl.run.history.slots import History, Kind
from slurmrl.run.history.state import end, fold
from slurmrl.run.metrics import read_latest
from slurmrl.run.paths import RunPaths
from slurmrl.scheduler import make
from slurmrl.scheduler.base import JobIds, Scheduler, TaskState
from slurmrl.watch import overview
from slurmrl.watch.snapshot import newest_submission

LEAVE_TIMEOUT_S = 60.0
"""Seconds that jobs without trainers may take to end after they were cancelled."""


@dataclass(frozen=True)
class Jobs:
    """The jobs of one submission, by group, and their scheduler."""

    number: int
    scheduler: Scheduler
    ids: JobIds

    def active(self) -> list[TaskState]:
        """Return the pending and running elements."""
        return [task for task in self.scheduler.query(self.ids) if task.state.active]


def newest_jobs(paths: RunPaths) -> Jobs | None:
    """Return the jobs of the newest submission; None if there is none.

    Raises SchedulerError where the scheduler does not answer.
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
    left = jobs.active()
    if left:
        jobs.scheduler.cancel(jobs.ids)
    deadline = time.monotonic() + LEAVE_TIMEOUT_S
    while left:
        if time.monotonic() > deadline:
            names = ", ".join(f"{task.job_id} ({task.raw})" for task in left)
            raise WaitTimeoutError(
                f"waited {LEAVE_TIMEOUT_S:.0f} s for jobs left from before: {names}"
            )
        sleep(0.1)
        left = jobs.active()


def uncommitted(paths: RunPaths) -> str:
    """Return ``steps 11 to 14``, the steps after the last commit of a trial that has not ended.

    Empty without such steps. Raises CorruptFileError, EnvironmentFailure.
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
    """Write the end into the history, then end the jobs.

    Return how the trial ended: CANCELLED unless another end came first.

    The history comes first, so that a link that starts in the meantime exits by itself.
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
    overview.keep_overview(paths)
    return kind
