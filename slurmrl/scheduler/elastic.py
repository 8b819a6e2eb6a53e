"""Elastic groups: a desired number of single-host tasks.

Their array is throttled (``%P``) and has more elements than run at once, so that Slurm itself
replaces a task that ends with a queued one. Where Slurm's commands work on the host that manages
the group, missing tasks are submitted one by one, and the throttle follows the desired number.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slurmrl.errors import UsageError
from slurmrl.paths import RunPaths
from slurmrl.scheduler import extensions, parse
from slurmrl.scheduler.base import JobState, TaskState
from slurmrl.scheduler.client import SlurmClient
from slurmrl.scheduler.extend import Extender
from slurmrl.scheduler.slurm import SlurmScheduler


@dataclass(frozen=True)
class Change:
    """The change that brings a group to the desired number of tasks."""

    submit: int = 0
    """Tasks to add."""
    cancel: tuple[TaskState, ...] = ()
    """Elements to end: queued ones first, then the youngest."""
    throttle: int | None = None
    """New throttle of the group's arrays; None: unchanged."""


def balance(desired: int, tasks: Sequence[TaskState], throttle: int) -> Change:
    """Return the change after which ``desired`` tasks run, given the elements of a group and their
    throttle. Elements beyond the throttle are spares and stay."""
    running = [task for task in tasks if task.state is JobState.RUNNING]
    queued = [task for task in tasks if task.state is JobState.PENDING]
    active = len(running) + len(queued)
    surplus = sorted(running, key=lambda task: task.element)[desired:]
    return Change(
        submit=max(desired - active, 0),
        cancel=(*(queued if desired == 0 else ()), *surplus),
        throttle=desired if desired != throttle and queued and desired > 0 else None,
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
        """``by``: the element (``41_3``) of this process. Another link may manage the group at the
        same time; ``sleep`` may raise to abandon a wait for it."""
        self._client = client or SlurmClient()
        self._scheduler = SlurmScheduler(self._client)
        self._run, self._number, self._group, self._by = run, number, group, by
        self._sleep = sleep
        self._throttle: int | None = None

    def keep(self, desired: int) -> Change:
        """Make sure that ``desired`` tasks run or are queued; return the change made.

        Raises SchedulerError where Slurm's commands do not work here: only the queued spares
        remain then.
        """
        jobs = self._scheduler.recover(self._run, self._number)
        if self._group not in jobs:
            raise UsageError(f"submission {self._number} has no group {self._group}")
        everybody = self._scheduler.query(jobs)
        tasks = [task for task in everybody if task.group == self._group]
        if self._throttle is None:
            _, self._throttle = extensions.length(self._run, self._number, self._group)
        change = balance(desired, tasks, self._throttle)
        if change.throttle is not None:
            for job in {task.job_id.partition("_")[0] for task in tasks if task.state.active}:
                self._client.throttle(job, change.throttle)
            self._throttle = change.throttle
        self._cancel(change.cancel)
        if change.submit:
            extender = Extender(
                self._client, self._run, self._number, self._group, sleep=self._sleep
            )
            extender.extend(everybody, known=jobs[self._group], by=self._by, count=change.submit)
        return change

    def _cancel(self, chosen: Sequence[TaskState]) -> None:
        by_job: dict[str, list[int]] = {}
        for task in chosen:
            by_job.setdefault(task.job_id.partition("_")[0], []).append(task.element)
        names = [f"{job}_[{parse.element_list(values)}]" for job, values in by_job.items()]
        if names:
            self._client.cancel(names)
