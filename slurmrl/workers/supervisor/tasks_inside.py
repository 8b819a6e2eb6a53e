"""Rollout tasks in the trainers' job, on the GPUs that the trainers do not use.

Each task is a child process of the supervisor: an agent, or the srun of a step next to the
trainers' step. Tasks outlive rounds and incarnations. The supervisor restarts a failed task without
affecting the trainers.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from slurmrl import env, log
from slurmrl.errors import CorruptFileError, EnvironmentFailure
from slurmrl.fsio import atomic
from slurmrl.name_resolve.store import NameStore
from slurmrl.plan.placement import ROLLOUTS
from slurmrl.run.events import EventWriter
from slurmrl.run.paths import RunPaths
from slurmrl.scheduler.client import SRUN
from slurmrl.watch import published
from slurmrl.workers.child_process import die_with

logger = log.get(__name__)

AGENT = "slurmrl.workers.agent"
SIGNALS = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
KEEP_S = 5.0
"""Interval at which the supervisor looks for failed tasks."""
MOST_FAILURES = 8
"""Number of consecutive failures after which a task is not restarted in this job."""
SOUND_S = 600.0
"""Seconds after which earlier failures of a running task no longer count."""
RETIRE_S = 30.0
"""Seconds that tasks may take to retire after the trainers have left the job."""
END_S = 10.0
"""Seconds that tasks may take to exit after TERM."""


@contextmanager
def signals_held_back() -> Iterator[None]:
    """Return a context in which the signals that the supervisor forwards are blocked."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        unblock()


def unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


@dataclass
class _Task:
    """A task. ``slot`` is its number among the tasks of its host."""

    number: int
    slot: int
    host: str = ""
    """Host of the task; empty without Slurm."""
    child: subprocess.Popen[bytes] | None = None
    started_s: float = 0.0
    failures: int = 0
    """Number of consecutive failures before this start."""

    @property
    def runs(self) -> bool:
        return self.child is not None and self.child.poll() is None

    @property
    def failed(self) -> bool:
        return self.child is not None and bool(self.child.poll())


class TasksInside:
    """The tasks of one job. Only the supervisor's main thread and its signal handler use them."""

    def __init__(
        self,
        options: Namespace,
        job: str,
        events: EventWriter,
        hosts: int,
        per_host: int,
        job_end: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        failed: Callable[[int], None] = lambda task: None,
    ) -> None:
        """Prepare ``per_host`` tasks on each of the ``hosts`` of a job.

        ``job`` is this start of the job (``JOBID.RESTART``). ``job_end`` is the time at which the
        job reaches its time limit, by this host's clock. ``failed`` gets the number of each task
        whose agent fails.
        """
        self._failed = failed
        self._options, self._job, self._events, self._clock = options, job, events, clock
        self._paths = RunPaths(options.run)
        self._direct = options.launcher == "direct"
        self._environ = {env.JOB_END.name: "" if job_end is None else str(job_end)}
        self._tasks = [_Task(number, number % per_host) for number in range(hosts * per_host)]
        self._spent: set[int] = set()
        """Tasks that have failed too often."""
        self._told_s: float | None = None
        """Time at which the supervisor first asked tasks to retire."""

    def __bool__(self) -> bool:
        return bool(self._tasks)

    @property
    def spent(self) -> bool:
        """Whether every task has failed too often."""
        return bool(self._tasks) and len(self._spent) == len(self._tasks)

    def start(self, hosts: Sequence[str]) -> None:
        """On the hosts of a new round (empty without Slurm), start all tasks that do not run."""
        self.keep(hosts)
        for task in self._tasks:
            if not task.runs and not task.failed:
                self._start(task, hosts)

    def keep(self, hosts: Sequence[str]) -> None:
        """Restart failed tasks."""
        for task in self._tasks:
            if task.failed and task.number not in self._spent:
                self._take_failure(task)
                if task.number not in self._spent:
                    begin_next_attempt(self._paths, ROLLOUTS, task.number, self._job)
                    self._start(task, hosts)

    def forward(self, number: int) -> None:
        """Send a signal to all running tasks."""
        if self._told_s is None:
            self._told_s = self._clock()
        for task in self._tasks:
            if task.child is not None and task.runs:
                task.child.send_signal(number)

    def end(self) -> None:
        """Give the tasks until `RETIRE_S` after their first warning to retire, then end them."""
        self.forward(signal.SIGUSR2)
        self._wait_until((self._told_s or 0.0) + RETIRE_S)
        self.forward(signal.SIGTERM)
        self._wait_until(self._clock() + END_S)
        self.forward(signal.SIGKILL)
        for task in self._tasks:
            if task.child is not None:
                task.child.wait()

    def _wait_until(self, deadline_s: float) -> None:
        while any(task.runs for task in self._tasks) and self._clock() < deadline_s:
            time.sleep(0.1)

    def _take_failure(self, task: _Task) -> None:
        assert task.child is not None
        code, sound = task.child.returncode, self._clock() - task.started_s >= SOUND_S
        task.failures = 1 if sound else task.failures + 1
        again = "the supervisor restarts it"
        if task.failures >= MOST_FAILURES:
            self._spent.add(task.number)
            again = "it has failed too often to be started again in this job"
        logger.warning("%s/%d exited with code %s: %s", ROLLOUTS, task.number, code, again)
        self._failed(task.number)

    def _start(self, task: _Task, hosts: Sequence[str]) -> None:
        task.host = self._host(task, hosts)
        parent, direct = os.getpid(), self._direct
        with signals_held_back():
            if set(signal.sigpending()) & set(SIGNALS):
                return
            task.child = subprocess.Popen(
                self._command(task),
                env={**os.environ, **self._environ},
                preexec_fn=(lambda: die_with(parent)) if direct else unblock,
            )
        task.started_s = self._clock()
        self._events.write("task_started", task=task.number, host=task.host, failures=task.failures)

    def _host(self, task: _Task, hosts: Sequence[str]) -> str:
        """Return the previous host of a task, or a host without a task in the same slot.

        The previous host counts only if the round still uses it.
        """
        if not hosts or task.host in hosts:
            return task.host
        taken = {one.host for one in self._tasks if one.slot == task.slot and one is not task}
        return next(host for host in hosts if host not in taken)

    def _command(self, task: _Task) -> list[str]:
        options = self._options
        agent = [sys.executable, "-P", "-m", AGENT, "--run", str(options.run)]
        agent += ["--submission", str(options.submission)]
        agent += ["--group", ROLLOUTS, "--task", str(task.number)]
        if self._direct:
            return agent
        place = [f"--nodelist={task.host}", "--nodes=1", "--ntasks=1", "--overlap"]
        return [*SRUN, *place, *agent]


def begin_next_attempt(paths: RunPaths, group: str, task: int, job: str) -> None:
    """Make the directory of the attempt that the next agent will claim.

    When the master sees this directory, it gives the items of the last attempt to other tasks. The
    next agent would make the directory later, because Python takes a second to start, or a minute
    on a slow file system.

    ``job`` is the start of the job (``JOBID.RESTART``) in which the task's agent has ended.
    """
    try:
        names = NameStore(paths.names)
        claim = published.newest_claim(names, group, task, job)
        if claim is not None:
            atomic.make_private_directory(paths.rollout_task(group, task, claim.attempt + 1))
    except (CorruptFileError, EnvironmentFailure) as error:
        text = "cannot prepare the next attempt at %s/%d; the task's items wait for it: %s"
        logger.warning(text, group, task, error)
