"""The local scheduler: one detached chain process per group on this machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

from slurmrl.errors import EnvironmentFailure, SchedulerError, UsageError
from slurmrl.run.paths import RunPaths
from slurmrl.scheduler import base, batch_script, submission
from slurmrl.scheduler.base import (
    GroupRequest,
    JobIds,
    JobState,
    Scheduler,
    SubmissionRequest,
    TaskState,
)
from slurmrl.scheduler.local_chain import SIGNALS, ChainState, chain_process, job_id
from slurmrl.scheduler.states import forgotten

CHAIN = "slurmrl.scheduler.local_chain"


class LocalScheduler(Scheduler):
    def __init__(self) -> None:
        self._files: dict[str, Path] = {}
        """State files of the jobs that this object has submitted or recovered."""

    def check(self) -> None:
        if not Path("/proc/self/stat").exists() or not Path("/bin/bash").exists():
            raise EnvironmentFailure("the local scheduler needs Linux with /proc and /bin/bash")

    def scripts(self, request: SubmissionRequest) -> dict[str, str]:
        return {
            group.name: batch_script.script(request, group, "direct") for group in request.groups
        }

    def submit(self, request: SubmissionRequest) -> dict[str, tuple[str, ...]]:
        for group in request.groups:
            if group.hosts > 1 and not group.elastic:
                raise SchedulerError(
                    f"group {group.name} requests {group.hosts} hosts; the local scheduler has one"
                )
        submission.write_scripts(request.run, request.number, self.scripts(request))
        jobs: dict[str, tuple[str, ...]] = {
            group.name: (self._start(request, group),) for group in request.groups
        }
        submission.write_jobs(request.run, request.number, jobs)
        return jobs

    def extend(self, run: RunPaths, number: int, group: str, *, by: str) -> str:
        raise UsageError("a local chain cannot be extended: run slurmrl resume when it has ended")

    def recover(self, run: RunPaths, number: int) -> dict[str, tuple[str, ...]]:
        jobs = submission.read_jobs(run, number)
        if jobs is None:
            groups = submission.job_names(run, number).values()
            states = {group: ChainState.read(run.local_chain(number, group)) for group in groups}
            jobs = {group: (state.job,) for group, state in states.items() if state is not None}
        for group, job in _each(jobs):
            self._files[job] = run.local_chain(number, group)
        return jobs

    def query(self, jobs: JobIds) -> list[TaskState]:
        return [task for group, job in _each(jobs) for task in self._tasks(group, job)]

    def cancel(self, jobs: JobIds, *, spare: str = "") -> None:
        for group, job in _each(jobs):
            keeps = any(
                task.job_id == spare and task.state is JobState.RUNNING
                for task in self._tasks(group, job)
            )
            self._signal(job, signal.SIGUSR1 if keeps else signal.SIGTERM)

    def interrupt(self, jobs: JobIds) -> None:
        for _, job in _each(jobs):
            self._signal(job, signal.SIGUSR2)

    def kill(self, jobs: JobIds) -> None:
        for _, job in _each(jobs):
            self._signal(job, signal.SIGQUIT)

    def _start(self, request: SubmissionRequest, group: GroupRequest) -> str:
        run = request.run
        width = group.hosts if group.elastic else 1
        arguments = [str(run.run), str(request.number), group.name, str(group.links), str(width)]
        output = run.batch_log(group.name, f"chain.{request.number}")
        environ = base.local_environment(os.environ)
        # -P: the working directory must not shadow the code snapshot.
        pid = os.posix_spawn(
            request.python,
            [request.python, "-P", "-m", CHAIN, *arguments],
            environ | base.snapshot_environment(request.code),
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
            setsigmask=SIGNALS,
        )
        process = submission.ProcessId.of(pid)
        if process is None:
            raise SchedulerError(f"the local chain of {group.name} ended at once: see {output}")
        job = job_id(process)
        self._files[job] = run.local_chain(request.number, group.name)
        return job

    def _tasks(self, group: str, job: str) -> list[TaskState]:
        """Return the elements of a job. The state file of a chain on another machine is trusted."""
        alive = chain_process(job).alive()
        state = self._state(job)
        if state is None:
            return [_starting(group, job) if alive else forgotten(group, job)]
        if alive or state.elsewhere:
            return state.tasks(group)
        return state.after_sudden_end().tasks(group)

    def _signal(self, job: str, number: signal.Signals) -> None:
        state = self._state(job)
        if state is not None and state.elsewhere and state.active:
            raise SchedulerError(f"job {job} runs on {state.host}: run the command there")
        chain_process(job).send(number)

    def _state(self, job: str) -> ChainState | None:
        file = self._files.get(job) or _file_of(chain_process(job))
        state = ChainState.read(file) if file else None
        return state if state is not None and state.job == job else None


def _each(jobs: JobIds) -> Iterator[tuple[str, str]]:
    return ((group, job) for group, ids in jobs.items() for job in ids)


def _file_of(process: submission.ProcessId) -> Path | None:
    """Return the state file of a chain that this object did not start, from its command line."""
    try:
        words = Path(f"/proc/{process.pid}/cmdline").read_text().split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return None
    if CHAIN not in words or not process.alive():
        return None
    run, number, group = words[words.index(CHAIN) + 1 :][:3]
    return RunPaths(Path(run)).local_chain(int(number), group)


def _starting(group: str, job: str) -> TaskState:
    state = JobState.PENDING
    return TaskState(f"{job}_0", group, 0, state, state.value, "the local chain is starting", ())
