"""Intervals at which processes read the shared directory, and checks that it still exists.

All processes of an idle trial together cause at most ``max(200, 0.5 x hosts)`` file operations per
second. In larger trials, hosts therefore poll less often and notice changes up to `poll_s` late. In
addition, busy rollout tasks cause up to ``max(1000, 2 x hosts)`` operations per second, and the
master causes fewer than 500 when it reads their results.

If the directory does not answer, processes wait. If the directory was removed, they exit, because
they can no longer exchange messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from slurmrl.backoff import Interval
from slurmrl.errors import ReportedError, RunGoneError
from slurmrl.fsio import atomic
from slurmrl.fsio.calls import REAL, SystemCalls
from slurmrl.run.paths import RunPaths
from slurmrl.run.reports import Cause, Failure

ITSELF = "."
LOOK_S = 5.0
GONE_S = 20.0
"""Seconds for which a directory must be missing until it counts as removed."""
OPERATIONS_PER_S = 200.0
OPERATIONS_PER_S_AND_HOST = 0.5
BEAT = 3
"""File operations of a heartbeat, a read of a lease or a poll of a log: open, transfer, close."""
CHECK = 3
"""File operations to poll an unchanged history (list it, look up the next slot), and to read the
size of the host's output in the same interval."""
PUBLISH = 16
"""Maximum file operations to replace the status."""
TASKS_OPERATIONS_PER_S = 1000.0
TASKS_OPERATIONS_PER_S_AND_HOST = 2.0
LOOK = 4
"""File operations of a rollout task to look for requests (read a log) and weights (list the
versions)."""
RESULTS_PER_S = 150.0
"""Maximum number of result logs that the master reads per second. With three operations of 1 ms per
log, the master keeps more than half of its time for the trainers."""
SHORTEST_POLL_S = 0.05
SHORTEST_RESULTS_S = 0.2
SHORTEST_TASK_S = 1.0
POLL_JITTER = 1.2
"""Maximum factor by which pauses between polls are randomly shortened (see `backoff`)."""


class Presence:
    """Checks whether the run directory exists, at most every ``look_s`` seconds."""

    def __init__(
        self,
        paths: RunPaths,
        *,
        look_s: float = LOOK_S,
        clock: Callable[[], float] = time.monotonic,
        calls: SystemCalls = REAL,
    ) -> None:
        self._paths = paths
        self._look_s = look_s
        self._clock = clock
        self._calls = calls
        self._looks = Interval(look_s, clock)
        self._since: float | None = None
        """Time at which a check first found a directory missing; None while all exist."""

    def check(self) -> None:
        """Raise an error if the run directory or a directory for messages was removed.

        Raises RunGoneError for the run directory. Raises ReportedError for a directory for
        messages. The next start creates it again.
        """
        if not self._looks.due():
            return
        now = self._clock()
        missing = self._missing()
        if not missing:
            self._since = None
            return
        self._since = now if self._since is None else self._since
        if now - self._since < GONE_S:
            return
        run = self._paths.run
        if missing == [ITSELF]:
            raise RunGoneError(f"the run directory {run} was removed, so this process exits")
        reason = (
            f"{', '.join(f'{name}/' for name in missing)} in {run} was removed while the trial ran"
        )
        # No host is the cause: leave `host` empty, so that later jobs exclude none.
        raise ReportedError(Failure(cause=Cause.ENVIRONMENT, reason=reason, host=""))

    def sleep(self, seconds: float) -> None:
        """Pause between two attempts, then call `check`."""
        self._calls.sleep(seconds)
        self.check()

    def wait(self) -> None:
        """Wait until the run directory exists. Raises RunGoneError."""
        while self._missing() == [ITSELF]:
            self.sleep(self._look_s)

    def _missing(self) -> list[str]:
        """Return the names of missing directories; none if the file system does not answer."""
        try:
            names = set(self._calls.listdir(self._paths.run))
        except FileNotFoundError:
            return [ITSELF]
        except OSError:
            return []
        return sorted({path.name for path in self._paths.channels()} - names)


def make_channels(paths: RunPaths) -> None:
    """Make missing directories for messages in the existing run directory.

    Raises EnvironmentFailure.
    """
    for directory in paths.channels():
        atomic.make_private_directory(directory)


@dataclass(frozen=True)
class PollIntervals:
    """Intervals at which processes use the shared directory, in seconds."""

    beat_s: float
    """Time between two heartbeats of an agent."""
    check_s: float
    """Time between two reads of the history by an agent."""
    status_s: float
    """Interval at which the master reads all leases and replaces the status."""
    poll_s: float
    """Maximum pause between two polls of a log if inotify cannot report its changes."""
    results_s: float
    """Interval at which the master reads the results of a busy rollout task."""
    task_s: float
    """Minimum interval at which a rollout task looks for requests and weights."""
    record_s: float
    """Minimum time between two records of results by a task, each with a wake-up."""
    spread_s: float
    """Period over which tasks spread their reads after a wake-up to all tasks."""

    @staticmethod
    def of(hosts: int, heartbeat_s: float) -> PollIntervals:
        """Return the intervals of a trial on ``hosts`` hosts.

        ``heartbeat_s`` is the minimum of the heartbeat, history and status intervals. Heartbeats
        get the largest share of the budget: one every 15 s even with 10,000 hosts.
        """
        budget = max(OPERATIONS_PER_S, OPERATIONS_PER_S_AND_HOST * hosts)
        beat_s = max(heartbeat_s, BEAT * hosts / (0.40 * budget))
        check_s = max(heartbeat_s, CHECK * hosts / (0.12 * budget))
        status_s = max(heartbeat_s, (BEAT * hosts + PUBLISH) / (0.10 * budget))
        used = _periodic_operations(hosts, beat_s, check_s, status_s)
        # Every agent polls the master's log, and the master polls every agent's log.
        polls = _polls(hosts)
        poll_s = max(SHORTEST_POLL_S, polls / (budget - used))
        record_s = hosts / RESULTS_PER_S
        results_s = max(SHORTEST_RESULTS_S, record_s)
        tasks = max(TASKS_OPERATIONS_PER_S, TASKS_OPERATIONS_PER_S_AND_HOST * hosts)
        spread_s = LOOK * hosts / tasks
        task_s = max(SHORTEST_TASK_S, spread_s)
        return PollIntervals(
            *(beat_s, check_s, status_s, poll_s, results_s, task_s, record_s, spread_s)
        )

    def operations_per_s(self, hosts: int) -> float:
        """Return the maximum file operations per second of an idle trial on ``hosts`` hosts."""
        periodic = _periodic_operations(hosts, self.beat_s, self.check_s, self.status_s)
        return periodic + _polls(hosts) / self.poll_s


def _periodic_operations(hosts: int, beat_s: float, check_s: float, status_s: float) -> float:
    """Return the file operations per second of heartbeats, checks and the status."""
    beats = BEAT * hosts / beat_s + CHECK * hosts / check_s
    return beats + (BEAT * hosts + PUBLISH) / status_s


def _polls(hosts: int) -> float:
    """Return the file operations of one poll of all logs."""
    return 2 * BEAT * hosts * POLL_JITTER
