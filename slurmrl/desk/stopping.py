"""The graceful end of a live trial, which commits and can be resumed."""

from __future__ import annotations

import time
from collections.abc import Callable

from slurmrl.desk.live import Jobs, clear_away, newest_jobs
from slurmrl.env import user_name
from slurmrl.errors import SchedulerError, UsageError
from slurmrl.run import demand
from slurmrl.run.history.slots import History
from slurmrl.run.history.state import fold
from slurmrl.run.paths import RunPaths
from slurmrl.run.reports import TRAINERS
from slurmrl.scheduler.base import JobState

POLL_S = 2.0
"""Seconds between two looks at the jobs of a trial that stops."""


def stop(paths: RunPaths) -> Jobs:
    """Tell the jobs of the newest submission to commit and exit; cancel its queued ones.

    Return all of them. Raises UsageError for a trial that has ended or has no job, SchedulerError.
    """
    name = f"{paths.experiment}/{paths.trial}"
    end = fold(History(paths.history).read()).end
    if end is not None:
        raise UsageError(f"{name} has already ended: {end.kind}")
    jobs = newest_jobs(paths)
    if jobs is None or not jobs.active():
        raise UsageError(f"{name} has no jobs to stop; to continue it: slurmrl resume {name}")
    demand.request_stop(paths, jobs.number, user_name())  # first: a link may be about to start
    try:
        jobs.scheduler.interrupt(jobs.ids)
        if not any(_trains(task.group, task.state) for task in jobs.active()):
            jobs.scheduler.cancel(jobs.ids)
    except SchedulerError:
        demand.withdraw_stop(paths, jobs.number)
        raise
    return jobs


def wait(paths: RunPaths, jobs: Jobs, sleep: Callable[[float], None] = time.sleep) -> str:
    """Wait until the jobs have ended and return how the trial ended, in words.

    Raises SchedulerError, WaitTimeoutError for jobs that stay after the trainers.
    """
    while any(task.group == TRAINERS for task in jobs.active()):
        sleep(POLL_S)
    clear_away(jobs, sleep)
    state = fold(History(paths.history).read())
    if state.end is not None:
        return f"has ended: {state.end.kind}"
    commit = state.last_commit
    return "is stopped, without a commit" if commit is None else f"is stopped at step {commit.step}"


def _trains(group: str, state: JobState) -> bool:
    return group == TRAINERS and state is JobState.RUNNING
