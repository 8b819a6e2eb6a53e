"""The Slurm scheduler. Each group is one job array, whose elements are the trial's links.

The array of an elastic group has a throttle (``%P``) and more elements than run at once. Slurm
itself therefore starts a queued task when a task ends. If Slurm's commands work on the host that
manages the group, `ElasticGroup` submits missing tasks, sets the throttle to the desired number of
tasks, and holds the array while no task is desired. The master tells surplus tasks to exit.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from slurmrl import log
from slurmrl.env import user_name
from slurmrl.errors import EnvironmentFailure, SchedulerError, UsageError
from slurmrl.fsio import documents
from slurmrl.run.paths import RunPaths
from slurmrl.run.reports import TRAINERS
from slurmrl.scheduler import base, batch_script, extensions, parse, states, submission
from slurmrl.scheduler.base import (
    GroupRequest,
    JobIds,
    JobState,
    Scheduler,
    SubmissionRequest,
    TaskState,
)
from slurmrl.scheduler.client import SlurmClient, may_have_worked
from slurmrl.scheduler.extensions import Extender
from slurmrl.scheduler.states import QueueRow

logger = log.get(__name__)


class SlurmScheduler(Scheduler):
    def __init__(self, client: SlurmClient | None = None) -> None:
        self.client = client or SlurmClient()
        self._memory = EndedElements(self.client)

    def check(self) -> None:
        if shutil.which("sbatch") is None:
            raise EnvironmentFailure(
                "sbatch is not on PATH: submit from a login node, or use --scheduler local"
            )
        try:
            self.client.ping()
        except SchedulerError as error:
            raise SchedulerError(
                f"nothing was submitted, because Slurm does not answer: {error}. Try again later, "
                "or use --scheduler local to run on this machine"
            ) from error

    def scripts(self, request: SubmissionRequest) -> dict[str, str]:
        return {group.name: batch_script.script(request, group, "srun") for group in request.groups}

    def submit(self, request: SubmissionRequest) -> dict[str, tuple[str, ...]]:
        most = self._most_links(request)
        groups = tuple(_shortened(group, most(group)) for group in request.groups)
        request = replace(request, groups=groups)
        submission.write_scripts(request.run, request.number, self.scripts(request))
        inherited = base.inherited_environment(os.environ)
        submission.write_environment(request.run, request.number, inherited)
        jobs: dict[str, tuple[str, ...]] = {}
        try:
            for group in groups:
                jobs[group.name] = (self._submit(request, group),)
        except SchedulerError:
            with contextlib.suppress(SchedulerError):
                self.cancel(jobs)
            raise
        submission.write_jobs(request.run, request.number, jobs)
        return jobs

    def extend(self, run: RunPaths, number: int, group: str, *, by: str) -> str:
        jobs = self.recover(run, number)
        extender = Extender(self.client, run, number, group)
        return extender.extend(self.query(jobs), known=jobs.get(group, ()), by=by)

    def recover(self, run: RunPaths, number: int) -> dict[str, tuple[str, ...]]:
        if submission.is_copied(run, number):
            return {}
        groups = submission.job_names(run, number)
        first = submission.read_jobs(run, number)
        more = {group: extensions.read(run, number, group) for group in groups.values()}
        names = {} if first is not None else dict.fromkeys(groups)
        names |= {one.name: None for each in more.values() for one in each if one.open}
        found = self._find(names)
        first = first or {group: (found[name],) for name, group in groups.items() if name in found}
        jobs = {
            group: first.get(group, ())
            + tuple(filter(None, (one.job or found.get(one.name) for one in more.get(group, ()))))
            for group in {**first, **more}
        }
        return {group: ids for group, ids in jobs.items() if ids}

    def query(self, jobs: JobIds) -> list[TaskState]:
        ids = [job for each in jobs.values() for job in each]
        if not ids:
            return []
        return states.task_states(self._memory.complete(self.client.queue(ids), ids), jobs)

    def cancel(self, jobs: JobIds, *, spare: str = "") -> None:
        self._cancel(jobs, lambda task: task.state.active and task.job_id != spare)

    def interrupt(self, jobs: JobIds) -> None:
        running = self._end_chain(jobs)
        if running:
            self.client.signal("USR2", running, steps=False)

    def kill(self, jobs: JobIds) -> None:
        running = self._end_chain(jobs)
        if running:
            self.client.signal("KILL", running, steps=True)

    def keep_off(self, run: RunPaths, number: int, group: str, *, by: str) -> None:
        """Exclude the trial's avoided hosts for the queued elements of a group.

        If Slurm rejects the change, replace them by new elements. Raises EnvironmentFailure,
        UsageError.
        """
        jobs = self.recover(run, number)
        everybody = self.query(jobs)
        if submission.exclude_from_queued(self.client, run, number, group, everybody):
            return
        left = [task for task in everybody if task.state is not JobState.PENDING]
        extender = Extender(self.client, run, number, group)
        extender.extend(left, known=jobs.get(group, ()), by=by)
        self.client.cancel(submission.queued_elements(everybody, group))

    def avoid(self, run: RunPaths, number: int, group: str, host: str, why: str) -> bool:
        """Avoid a host from now on; return False if every job of the group needs the host.

        Also exclude the host for the queued elements of the group. If Slurm rejects this change,
        the next `keep_off` of a chain replaces the elements. Raises EnvironmentFailure.
        """
        if not submission.avoid_host(self.client, run, number, group, host, why):
            return False
        queued = self.query(self.recover(run, number))
        submission.exclude_from_queued(self.client, run, number, group, queued)
        return True

    def exclude(self, run: RunPaths, number: int, group: str, element: str) -> None:
        """Exclude the trial's avoided hosts for one queued element.

        Raises SchedulerError.
        """
        self.client.exclude(element, submission.excluded_hosts(run, number, group))

    def _most_links(self, request: SubmissionRequest) -> Callable[[GroupRequest], int | None]:
        """Return a function that returns the maximum length of a group's array for this user.

        The function returns None if the maximum is unknown.
        """
        try:
            most = extensions.array_limit(self.client.settings())
        except SchedulerError as error:
            logger.info("Slurm does not report the maximum length of an array: %s", error)
            return lambda group: None
        answer = ""
        # A cluster may have no accounting, or hide it from ordinary users.
        with contextlib.suppress(SchedulerError):
            answer = self.client.submit_limits(user_name())

        def of_group(group: GroupRequest) -> int | None:
            account = batch_script.slurm_options(request, group).get("account")
            found = (most, extensions.submit_room(answer, user_name(), account))
            return min((limit for limit in found if limit is not None), default=None)

        return of_group

    def _submit(self, request: SubmissionRequest, group: GroupRequest) -> str:
        """Submit one group; halve the number of elements after each rejection by a limit."""
        script = request.run.submission_script(request.number, group.name)
        try:
            return self.client.submit(
                script, *submission.exclude_option(request.run, request.number, group.name)
            )
        except SchedulerError as error:
            if may_have_worked(error):
                return self._find_lost(request, group, error)
            if not extensions.TOO_MANY.search(str(error)) or group.links == 1:
                raise
            refused = error
        logger.info("sbatch rejected %d elements: %s", group.links, refused)
        group = _shortened(group, group.links // 2)
        text = batch_script.script(request, group, "srun")
        submission.write_scripts(request.run, request.number, {group.name: text})
        return self._submit(request, group)

    def _find_lost(
        self, request: SubmissionRequest, group: GroupRequest, error: SchedulerError
    ) -> str:
        name = request.job_name(group.name)
        try:
            found = self._find({name: None})
        except SchedulerError:
            raise error from None  # Slurm does not answer, so the job may exist.
        if name not in found:
            if parse.NO_JOB_ID in str(error):  # sbatch has ended, so no job can appear later.
                text = str(error).replace(parse.NO_JOB_ID, "sbatch submitted no job but printed")
                raise SchedulerError(text) from None
            raise error
        return found[name]

    def _find(self, names: Mapping[str, None]) -> dict[str, str]:
        """Return a mapping from each name that a job in Slurm has to the job's id."""
        return {row.name: row.job for row in self.client.queue_by_name(names)} if names else {}

    def _end_chain(self, jobs: JobIds) -> list[str]:
        """Cancel the links that have not started; return the names of the running elements."""
        self._cancel(jobs, lambda task: task.state is JobState.PENDING)
        return [task.job_id for task in self.query(jobs) if task.state is JobState.RUNNING]

    def _cancel(self, jobs: JobIds, which: Callable[[TaskState], bool]) -> None:
        if names := submission.element_ranges(filter(which, self.query(jobs))):
            self.client.cancel(names)


def _shortened(group: GroupRequest, most: int | None) -> GroupRequest:
    if most is None or group.links <= most:
        return group
    links = max(most, 1)
    logger.warning(
        "this cluster accepts only %d of the %d queued jobs of group %s; when they are used up, "
        "slurmrl resume adds more",
        links,
        group.links,
        group.name,
    )
    return replace(group, links=links)


class EndedElements:
    """The rows of ended elements that squeue no longer shows, from sacct.

    sacct runs only if elements are missing. After a failure, or a report that there is no
    accounting, sacct never runs again.
    """

    def __init__(self, client: SlurmClient) -> None:
        self._client = client
        self._there = True
        self._known: dict[tuple[str, int], QueueRow] = {}
        self._asked: set[tuple[str, int]] = set()

    def complete(self, found: Sequence[QueueRow], jobs: Sequence[str]) -> list[QueueRow]:
        """Return the rows of squeue and the rows of elements that squeue no longer shows."""
        seen = {(row.job, element) for row in found for element in row.elements}
        lacking = [job for job in jobs if self._lacks(job, seen)]
        if lacking and self._there:
            self._ask(lacking)
            self._asked |= {(job, _lowest(job, seen)) for job in lacking}
        wanted = set(jobs)
        older = [row for key, row in self._known.items() if key not in seen and key[0] in wanted]
        return [*found, *older]

    def _lacks(self, job: str, seen: set[tuple[str, int]]) -> bool:
        """Return whether sacct may add elements of a job.

        This is always true for a job without any row, because the accounting database may have
        recorded the job since the last query.
        """
        lowest = _lowest(job, seen)
        return lowest != 0 and (lowest < 0 or (job, lowest) not in self._asked)

    def _ask(self, jobs: Sequence[str]) -> None:
        try:
            answer = self._client.accounting(jobs)
        except SchedulerError as error:
            logger.info("sacct is not called again: %s", error)
            answer = None
        self._there = answer is not None
        # Prefer an element's own row, which has more details, to its cancelled array's row.
        for row in sorted(answer or (), key=lambda row: len(row.elements), reverse=True):
            if not states.interpret(row.raw).state.active:  # squeue shows the active elements.
                for element in row.elements:
                    self._known[row.job, element] = replace(row, elements=(element,))


def _lowest(job: str, seen: set[tuple[str, int]]) -> int:
    return min((element for name, element in seen if name == job), default=-1)


HELD: Final = "JobHeldUser"
"""Slurm's reason for a pending element that its user holds."""

FINISHED: Final = "Job has already finished"
"""Message of scontrol if some elements have ended. scontrol changes the other elements."""


@dataclass(frozen=True)
class Change:
    """The change that brings a group to the desired number of tasks."""

    submit: int = 0
    """Number of tasks to add."""
    throttle: int | None = None
    """New throttle of the group's arrays; None keeps the throttle."""
    hold: bool = False
    """Whether to hold the queued elements, so that they cannot start."""
    release: bool = False
    """Whether to release held elements, so that they can start."""


def balance(desired: int, tasks: Sequence[TaskState], throttle: int | None) -> Change:
    """Return the change after which ``desired`` tasks run or are queued, and no other tasks start.

    ``tasks`` are the elements of a group, and ``throttle`` is their throttle, if it is known.
    Queued elements beyond the throttle stay, because they replace tasks that end.
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
        """Manage a group from the element ``by`` (``41_3``) of this process.

        Another link may manage the group at the same time. ``sleep`` may raise an error to abandon
        a wait for the other link.
        """
        self._client = client or SlurmClient()
        self._scheduler = SlurmScheduler(self._client)
        self._run, self._number, self._group, self._by = run, number, group, by
        self._sleep = sleep
        self._throttle: int | None = None

    def keep(self, desired: int) -> Change:
        """Ensure that ``desired`` tasks run or are queued, and no others start; return the change.

        Raises SchedulerError if Slurm's commands do not work on this host. After such an error,
        only queued elements can replace tasks.
        """
        jobs = self._scheduler.recover(self._run, self._number)
        known, request = jobs.get(self._group, ()), self._run.submission_request(self._number)
        # A group without a job is submitted here, unless its submitter is still alive.
        if not known and (not jobs or submission.may_submit(documents.read(request))):
            raise UsageError(f"submission {self._number} has no group {self._group} yet")
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
            extender.extend(everybody, known=known, by=self._by, count=change.submit)
        return change

    def leave_alone(self) -> None:
        """Prevent queued tasks from starting while no trainers run.

        Hold the tasks if a job of the trainers waits or runs, else cancel them. Raises
        SchedulerError.
        """
        everybody = self._scheduler.query(self._scheduler.recover(self._run, self._number))
        if any(task.group == TRAINERS and task.state.active for task in everybody):
            self.keep(0)
        elif queued := submission.queued_elements(everybody, self._group):
            self._client.cancel(queued)

    def _change(self, elements: str, change: Change) -> None:
        """Apply a change to the queued elements of an array (``41_[2-7]``).

        Ignore elements that have started since the query.
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
