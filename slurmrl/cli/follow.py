"""Watching a submitted trial until it ends; what Ctrl-C does meanwhile."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from slurmrl.cli.live import View
from slurmrl.errors import EnvironmentFailure
from slurmrl.monitor.snapshot import read
from slurmrl.monitor.status import assemble
from slurmrl.paths import RunPaths
from slurmrl.scheduler.base import TaskState
from slurmrl.scheduler.poll import SchedulerPoll
from slurmrl.submission.live import Jobs

POLL_S = {"local": 0.5}
"""Seconds between two looks at a run."""
SHARED_POLL_S = 10.0
"""The same where the scheduler and the directory serve other people too."""
LEAVE_S = 15.0
"""How long the processes of an ended local trial are waited for."""

EXIT_CODES = {"COMPLETED": 0, "FAILED": 1}
INTERRUPTED = 130


class Interrupts:
    """Counts Ctrl-C instead of raising KeyboardInterrupt somewhere."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Interrupts:
        self._before = signal.signal(signal.SIGINT, self._add)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _add(self, number: int, frame: FrameType | None) -> None:
        self.count += 1


class TrialFollower:
    """One run that is watched."""

    def __init__(
        self,
        paths: RunPaths,
        kind: str,
        jobs: Jobs,
        view: View,
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._paths = paths
        self._local = kind == "local"
        self._poll_s = POLL_S.get(kind, SHARED_POLL_S)
        self._jobs = jobs
        self._query = (
            jobs.scheduler.query if self._local else SchedulerPoll(kind, jobs.scheduler).query
        )
        self._view = view
        self._sleep = sleep
        self._tasks: list[TaskState] = []
        self._handled = 0

    def run(self) -> dict[str, Any]:
        """The last status: of an ended or interrupted trial, or of a Slurm one that the user
        stopped watching."""
        leave_at: float | None = None
        with Interrupts() as interrupts:
            while True:
                status = self._look()
                self._view.update(status)
                if status["state"] not in ("PENDING", "RUNNING"):
                    now = time.monotonic()
                    leave_at = leave_at or now + LEAVE_S
                    gone = not any(task.state.active for task in self._tasks)
                    if gone or not self._local or now >= leave_at:
                        return status
                self._pause(interrupts)
                if interrupts.count > self._handled:
                    if not self._local:
                        return status
                    self._stop(interrupts.count)

    def _look(self) -> dict[str, Any]:
        problem = None
        try:
            self._tasks = self._query(self._jobs.ids)
        except EnvironmentFailure as error:
            problem = str(error)  # what was known before stands until it answers again
        return assemble(read(self._paths), self._tasks, problem=problem)

    def _pause(self, interrupts: Interrupts) -> None:
        deadline = time.monotonic() + self._poll_s
        while interrupts.count == self._handled and time.monotonic() < deadline:
            self._sleep(min(0.1, self._poll_s))

    def _stop(self, count: int) -> None:
        """Ctrl-C on a local run: first stop at a step, then kill."""
        first = self._handled == 0 and count == 1
        self._handled = count
        if first:
            self._view.note("stopping at the next step and committing; Ctrl-C again kills")
            self._jobs.scheduler.interrupt(self._jobs.ids)
        else:
            self._view.note("killing; the last commit stands")
            self._jobs.scheduler.kill(self._jobs.ids)


def exit_code(status: dict[str, Any]) -> int:
    """0 completed, 1 failed, 130 whatever interrupted it."""
    return EXIT_CODES.get(status["state"], INTERRUPTED)
