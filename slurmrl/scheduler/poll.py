"""Adaptive polling of a scheduler: one query for all jobs of all trials, rare while nothing
changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from slurmrl.errors import EnvironmentFailure
from slurmrl.scheduler.base import JobIds, Scheduler, TaskState

SHORTEST_S = {"local": 0.5}
"""Seconds between two queries while states change."""
SHARED_SHORTEST_S = 10.0
"""The same for a scheduler with other users."""
LONGEST_S = {"local": 2.0}
SHARED_LONGEST_S = 120.0
GROWTH = 1.5


class SchedulerPoll:
    """Keeps the last answer and the time of the next query: soon after a change, later the longer
    nothing changes. Nothing runs between the calls."""

    def __init__(
        self, kind: str, scheduler: Scheduler, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._shortest_s = SHORTEST_S.get(kind, SHARED_SHORTEST_S)
        self._longest_s = LONGEST_S.get(kind, SHARED_LONGEST_S)
        self._pause_s = self._shortest_s
        self._due = 0.0
        self._asked: dict[str, tuple[str, ...]] | None = None
        self._answer: list[TaskState] = []
        self._failure: EnvironmentFailure | None = None
        """Why there is no answer for the jobs that were asked for last."""

    @property
    def pause_s(self) -> float:
        """Seconds until the next query is due; 0 if it is due now."""
        return max(self._due - self._clock(), 0.0) if self._asked is not None else 0.0

    def query(self, jobs: JobIds) -> list[TaskState]:
        """Return the states of these jobs: the last answer, or a new one if it is due or the jobs
        differ. Raises SchedulerError, after which the pause has grown too; until it is over, so do
        calls for jobs of which there is no earlier answer."""
        if self._asked == dict(jobs) and self.pause_s > 0:
            if self._failure is not None:
                raise self._failure
            return self._answer
        changed = self._asked != dict(jobs)
        self._asked = dict(jobs)
        try:
            answer = self._scheduler.query(jobs)
            changed = changed or _shape(answer) != _shape(self._answer)
            self._answer, self._failure = answer, None
        except EnvironmentFailure as error:
            self._failure = error if changed or self._failure is not None else None
            raise
        finally:
            grown_s = min(self._pause_s * GROWTH, self._longest_s)
            self._pause_s = self._shortest_s if changed else grown_s
            self._due = self._clock() + self._pause_s
        return self._answer


def _shape(tasks: list[TaskState]) -> Mapping[tuple[str, str], tuple[str, str, int]]:
    """Return what counts as a change: everything but times."""
    return {(t.group, t.job_id): (t.raw, t.reason, t.restarts) for t in tasks}
