"""One question to a scheduler for all jobs of all trials, asked seldom while nothing changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from slurmrl.scheduler.base import JobIds, Scheduler, TaskState

SHORTEST_S = {"local": 0.5}
"""Seconds between two questions while things change."""
SHARED_SHORTEST_S = 10.0
"""The same for a scheduler that serves other people too."""
LONGEST_S = {"local": 2.0}
SHARED_LONGEST_S = 120.0
GROWTH = 1.5


class SchedulerPoll:
    """Remembers the last answer, and when the next question is due: soon after a change, and after
    ever longer pauses while there is none. Nothing runs between the calls."""

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

    @property
    def pause_s(self) -> float:
        """Until the next question is due; 0 if it is."""
        return max(self._due - self._clock(), 0.0) if self._asked is not None else 0.0

    def query(self, jobs: JobIds) -> list[TaskState]:
        """The states of these jobs: what was said last, or a new answer if one is due or other jobs
        are asked about. Raises SchedulerError, after which the pause has grown too."""
        if self._asked == dict(jobs) and self.pause_s > 0:
            return self._answer
        changed = self._asked != dict(jobs)
        self._asked = dict(jobs)
        try:
            answer = self._scheduler.query(jobs)
            changed = changed or _shape(answer) != _shape(self._answer)
            self._answer = answer
        finally:
            grown_s = min(self._pause_s * GROWTH, self._longest_s)
            self._pause_s = self._shortest_s if changed else grown_s
            self._due = self._clock() + self._pause_s
        return self._answer


def _shape(tasks: list[TaskState]) -> Mapping[tuple[str, str], tuple[str, str, int]]:
    """What counts as a change; time goes by in any case."""
    return {(t.group, t.job_id): (t.raw, t.reason, t.restarts) for t in tasks}
