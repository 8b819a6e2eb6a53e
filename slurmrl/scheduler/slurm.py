"""The Slurm scheduler: one job array per group, whose elements are the links of the trial."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping

from slurmrl.errors import EnvironmentFailure, SchedulerError
from slurmrl.paths import RunPaths
from slurmrl.scheduler import parse, render, submission
from slurmrl.scheduler.base import JobState, Scheduler, SubmissionRequest, TaskState
from slurmrl.scheduler.client import SlurmClient

TRANSIENT = ("Socket timed out", "Unable to contact slurm controller", "did not answer")
"""Failures of sbatch after which the job may nevertheless have been submitted."""


class SlurmScheduler(Scheduler):
    def __init__(self, client: SlurmClient | None = None) -> None:
        self._client = client or SlurmClient()

    def check(self) -> None:
        if shutil.which("sbatch") is None:
            raise EnvironmentFailure(
                "sbatch is not on PATH: submit from a login node, or use --scheduler local"
            )
        self._client.ping()

    def scripts(self, request: SubmissionRequest) -> dict[str, str]:
        return {group.name: render.script(request, group, "srun") for group in request.groups}

    def submit(self, request: SubmissionRequest) -> dict[str, str]:
        scripts = self.scripts(request)
        submission.write_scripts(request.run, request.number, scripts)
        jobs: dict[str, str] = {}
        try:
            for group in scripts:
                jobs[group] = self._submit(request, group)
        except SchedulerError:
            with contextlib.suppress(SchedulerError):
                self.cancel(jobs)
            raise
        submission.write_jobs(request.run, request.number, jobs)
        return jobs

    def recover(self, run: RunPaths, number: int) -> dict[str, str]:
        jobs = submission.read_jobs(run, number)
        if jobs is not None:
            return jobs
        return self._find(submission.job_names(run, number))

    def query(self, jobs: Mapping[str, str]) -> list[TaskState]:
        if not jobs:
            return []
        return parse.task_states(self._client.queue(jobs.values()), jobs)

    def cancel(self, jobs: Mapping[str, str], *, after: int = -1) -> None:
        self._cancel(jobs, lambda task: task.state.active and task.element > after)

    def interrupt(self, jobs: Mapping[str, str]) -> None:
        running = self._end_chain(jobs)
        if running:
            self._client.signal("USR2", running, steps=False)

    def kill(self, jobs: Mapping[str, str]) -> None:
        running = self._end_chain(jobs)
        if running:
            self._client.signal("KILL", running, steps=True)

    def _submit(self, request: SubmissionRequest, group: str) -> str:
        try:
            return self._client.submit(request.run.submission_script(request.number, group))
        except SchedulerError as error:
            if not any(words in str(error) for words in TRANSIENT):
                raise
            found = self._find({request.job_name(group): group})
            if group not in found:
                raise
            return found[group]

    def _find(self, groups_by_name: Mapping[str, str]) -> dict[str, str]:
        if not groups_by_name:
            return {}
        rows = self._client.queue_by_name(groups_by_name)
        return {groups_by_name[row.name]: row.job for row in rows}

    def _end_chain(self, jobs: Mapping[str, str]) -> list[str]:
        """Cancel the links that have not started; returns the names of the running elements."""
        self._cancel(jobs, lambda task: task.state is JobState.PENDING)
        return [task.job_id for task in self.query(jobs) if task.state is JobState.RUNNING]

    def _cancel(self, jobs: Mapping[str, str], which: Callable[[TaskState], bool]) -> None:
        """Cancel elements by range: a bare job id can mean the whole array or its last element."""
        chosen: dict[str, list[int]] = {}
        for task in self.query(jobs):
            if which(task):
                chosen.setdefault(jobs[task.group], []).append(task.element)
        names = [f"{job}_[{parse.element_list(values)}]" for job, values in chosen.items()]
        if names:
            self._client.cancel(names)
