"""Elastic groups of single-host tasks, whose desired number may change.

Their array has a throttle (``%P``) and more elements than run at once, so Slurm itself replaces a
task that ends with a queued one. If Slurm's commands work on the host that manages the group, this
host submits missing tasks one by one and sets the throttle to the desired number. It holds the
array while no task is desired. This module does not end surplus tasks: the master tells them to
leave.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from slurmrl.errors import SchedulerError, UsageError
from slurmrl.run.paths import RunPaths
from slurmrl.run.reports import TRAINERS
from slurmrl.scheduler import submission
from slurmrl.scheduler.base import JobState, TaskState
from slurmrl.scheduler.client import SlurmClient
from slurmrl.scheduler.extensions import Extender
from slurmrl.scheduler.slurm import SlurmScheduler

HELD: Final = "JobHeldUser"
"""Slurm's reason why an element does not start: its user holds it."""

FINISHED: Final = "Job has already finished"
"""scontrol's message if some elements of an array have ended; it still changes the others."""


@dataclass(frozen=True)
class Change:
    """The change that brings a group to the desired number of tasks."""

    submit: int = 0
    """Tasks to add."""
    throttle: int | None = None
    """New throttle of the group's arrays; None: unchanged."""
    hold: bool = False
    """Whether no queued element may start."""
    release: bool = False
    """Whether held elements may start again."""


def balance(desired: int, tasks: Sequence[TaskState], throttle: int | None) -> Change:
    """Return the change with which ``desired`` tasks run or are queued, and no more start.

    ``tasks`` are the elements of a group, and ``throttle`` is their throttle, if it is known.
    Elements beyond the throttle are spares and stay.
    """
    queued = [task for task in tasks if task.state is JobState.PENDING]
    held = [task for task in queued if task.reason == HELD]
    if desired == 0:
        return Change(hold=len(held) < len(queued))
    active = sum(task.state.active for task in tasks)
    return Change(
        submit=max(desired - active, 0),
        throttle=desired if desired != throttle and queued else None,
        release=bool(held),
    )


class ElasticGroup:
    """One elastic group of one submission, managed by a link of the trainers."""

    def __init__(
        self,
        run: RunPaths,
        number: int,
        group: str,
        client: SlurmClient | None = None,
        *,
        by: str,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """``by`` is the element (``41_3``) of this process.

        Another link may manage the group at the same time; ``sleep`` may raise to abandon a wait
        for it.
        """
        self._client = client or SlurmClient()
        self._scheduler = SlurmScheduler(self._client)
        self._run, self._number, self._group, self._by = run, number, group, by
        self._sleep = sleep
        self._throttle: int | None = None

    def keep(self, desired: int) -> Change:
        """Ensure that ``desired`` tasks run or are queued, and that no more start.

        Return the change that was made. Raises SchedulerError if Slurm's commands do not work here;
        only queued spares can then replace tasks.
        """
        jobs = self._scheduler.recover(self._run, self._number)
        if self._group not in jobs:
            raise UsageError(f"submission {self._number} has no group {self._group}")
        everybody = self._scheduler.query(jobs)
        tasks = [task for task in everybody if task.group == self._group]
        change = balance(desired, tasks, self._throttle)
        for elements in submission.queued_elements(tasks, self._group):
            self._change(elements, change)
        self._throttle = change.throttle or self._throttle
        if change.submit:
            extender = Extender(
                self._client, self._run, self._number, self._group, sleep=self._sleep
            )
            extender.extend(everybody, known=jobs[self._group], by=self._by, count=change.submit)
        return change

    def leave_alone(self) -> None:
        """Prevent queued tasks from starting while no trainers run.

        Hold the tasks while a job of the trainers waits or runs, else cancel them. Raises
        SchedulerError.
        """
        everybody = self._scheduler.query(self._scheduler.recover(self._run, self._number))
        if any(task.group == TRAINERS and task.state.active for task in everybody):
            self.keep(0)
        elif queued := submission.queued_elements(everybody, self._group):
            self._client.cancel(queued)

    def _change(self, elements: str, change: Change) -> None:
        """Apply a change to the queued elements of an array (``41_[2-7]``).

        Some elements may have started in the meantime.
        """
        try:
            if change.throttle is not None:
                self._client.throttle(elements.partition("_")[0], change.throttle)
        except SchedulerError as error:
            if FINISHED not in str(error):
                raise
        try:
            if change.hold:
                self._client.hold(elements)
            if change.release:
                self._client.release(elements)
        except SchedulerError as error:
            if submission.NO_LONGER_PENDING not in str(error):
                raise
