"""Detection of failures: the processes of a host, the host's own lease, and other hosts.

`Symptoms` evaluates the events of the host's processes and the kernel's out-of-memory kills.
`LeaseGuard` renews the host's lease, and stops the host from starting work while the lease may have
expired. `Leader` detects the loss of a job's first host, on which the master and the batch process
run. The other agents of the round then end the incarnation and requeue the job. `TrainersLease`
tells a rollout task whether the trainers are alive.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from slurmrl import log
from slurmrl.backoff import Interval
from slurmrl.errors import EnvironmentFailure, ReportedError
from slurmrl.name_resolve.store import NameStore
from slurmrl.run.lease import GAPS_PER_TTL, LeaseView
from slurmrl.run.paths import RunPaths
from slurmrl.run.reports import Cause, Failure, Identity
from slurmrl.scheduler.chain import Link
from slurmrl.scheduler.client import usable_hosts
from slurmrl.scheduler.submission import Orphaned
from slurmrl.tensors.parallel.gpu import GpuFault, find_in
from slurmrl.workers.agent.children import MASTER, Children, Ended, News
from slurmrl.workers.link import FirstAgent, requeue

logger = log.get(__name__)

ECHO_GRACE_S = 2.0
"""Seconds by which the agent delays an exception that looks like a consequence of another rank's
end. The report on the other rank explains the failure better."""
ECHO_TURN_S = 0.1
WATCHDOG = "watchdog thread terminated with exception"
"""Text that torch's NCCL watchdog prints before it aborts the process. The reason follows."""
OWN_CGROUPS = Path("/proc/self/cgroup")
COUNTER = "oom_kill"


class Symptoms:
    """Evaluates events of a host's processes; raises ReportedError for the first failure."""

    def __init__(
        self,
        host: str,
        children: Children,
        oom: OomKills,
        silence_s: float,
        clock: Callable[[], float] = time.monotonic,
        output: Callable[[], str] = str,
    ) -> None:
        """``output`` returns the newest output of the processes in this incarnation."""
        self.told_to_exit = False
        """Whether this process has told the workers to exit."""
        self._host = host
        self._children = children
        self._oom = oom
        self._silence_s = silence_s
        self._output = output
        self._clock = clock
        self._echo: Failure | None = None
        self._echo_until = math.inf

    @property
    def longest_turn_s(self) -> float:
        """Maximum seconds that the next turn may wait."""
        return math.inf if self._echo is None else ECHO_TURN_S

    def evaluate(self, news: News) -> None:
        for failure in news.failures:
            if not failure.echo:
                raise ReportedError(replace(failure, host=self._host))
            if self._echo is None:
                self._echo, self._echo_until = failure, self._clock() + ECHO_GRACE_S
        for ended in news.ended:
            self._evaluate_end(ended)
        silent = self._children.silent()
        if silent and not self.told_to_exit:  # An exiting process sends no pulse.
            raise ReportedError(self._of_silence(silent[0]))
        if self._echo is not None and self._clock() >= self._echo_until:
            raise ReportedError(replace(self._echo, host=self._host))

    def _evaluate_end(self, ended: Ended) -> None:
        is_master = ended.name == MASTER
        early = not is_master and not self.told_to_exit
        if ended.code == 0 and not early:
            return
        if ended.rank is None and not is_master and ended.code > 0 and not ended.why:
            ended = replace(ended, why=self._last_words())
        reason = str(ended) if ended.code else f"{ended.name} exited unexpectedly"
        cause = Cause.MASTER if is_master else Cause.DIED
        if ended.code == -signal.SIGKILL and self._oom.happened():
            cause, reason = Cause.OOM, f"{reason} (the kernel's OOM killer)"
        certain = False
        if ended.code == -signal.SIGABRT and (fault := self._fault_that_aborted()):
            cause, reason = Cause.GPU_FAULT, f"{reason}: its GPU failed: {fault.words}"
            certain = fault.certain
        raise ReportedError(
            Failure(
                cause=cause,
                reason=reason,
                host=self._host,
                world=self._children.world,
                rank=ended.rank,
                exit_code=ended.code,
                certain=certain,
            )
        )

    def _last_words(self) -> str:
        """Return a phrase with the last line of the log, which another process may have written."""
        lines = [line.strip() for line in self._output().splitlines() if line.strip()]
        return f"the log ends with: {lines[-1]}" if lines else ""

    def _fault_that_aborted(self) -> GpuFault | None:
        """Return the GPU fault that made torch's NCCL watchdog end a process.

        The watchdog checks the GPU every 100 ms, so it may notice a fault before the rank does.
        """
        lines = self._output().splitlines()
        faults = (find_in(line) for line in lines if WATCHDOG in line)
        return next((fault for fault in faults if fault is not None), None)

    def _of_silence(self, rank: int | None) -> Failure:
        name = self._children.name(rank)
        return Failure(
            cause=Cause.HUNG,
            reason=f"{name} sent no heartbeat for {self._silence_s:g} s and was killed",
            host=self._host,
            world=self._children.world,
            rank=rank,
            silent_s=self._silence_s,
        )


class OomKills:
    """Reads the kernel's count of out-of-memory kills from the most precise available counter.

    The counter belongs to this process's control group (version 2 or 1), otherwise to the whole
    host. The group contains all children, even in containers.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._path = next((path for path in _counters(root) if _count(path) is not None), None)
        self._seen = self._count()

    def happened(self) -> bool:
        """Return whether the kernel killed a process since the last call, or since the start."""
        before, self._seen = self._seen, self._count()
        return self._seen > before

    def _count(self) -> int:
        return (_count(self._path) if self._path is not None else None) or 0


def _counters(root: Path) -> list[Path]:
    """Return the files that may contain a counter, the most precise counter first."""
    counters: list[Path] = []
    mounted = root / "sys/fs/cgroup"
    for line in _read(root / OWN_CGROUPS.relative_to("/")).splitlines():
        _, controllers, group = line.split(":", 2)
        own = group.lstrip("/")
        if not controllers:
            folders = (mounted, mounted / "unified")
            counters += [folder / own / "memory.events" for folder in folders]
        elif "memory" in controllers.split(","):
            counters.append(mounted / "memory" / own / "memory.oom_control")
    return [*counters, root / "proc/vmstat"]


def _count(path: Path) -> int | None:
    """Return the count of out-of-memory kills in a file, or None if it contains none."""
    fields = [line.split() for line in _read(path).splitlines()]
    counts = [words[1] for words in fields if len(words) == 2 and words[0] == COUNTER]
    return int(counts[0]) if counts and counts[0].isdecimal() else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


WATCHERS = 3
"""Number of agents that watch the first agent."""
GRACE_S = 30.0
"""Seconds that a batch process may take to end this step, if it still runs."""
LOOK_S = 3.0


class LeaseGuard:
    """Renews the lease every ``beat_s`` and reads the history every ``check_s``.

    The host is fenced while other hosts may consider it dead: it then starts no new work. It is
    fenced after a failed renewal, or ``ttl_s`` seconds after the last successful renewal began (the
    process was suspended or hung). A successful renewal and then a successful read of the history
    lift the fence. If the directory does not answer, no process ends.
    """

    def __init__(
        self,
        beat: Callable[[], None],
        check: Callable[[], None],
        *,
        beat_s: float,
        check_s: float,
        ttl_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``beat`` renews the lease; ``check`` raises if the incarnation must end.

        Both functions raise EnvironmentFailure while the directory does not answer.
        """
        self._beat = beat
        self._check = check
        self._beat_s = beat_s
        self._check_s = check_s
        self._ttl_s = ttl_s
        self._clock = clock
        self._next_beat = self._next_check = clock()
        self._beaten_at: float | None = None
        """Time at which the last renewal began; None if it failed."""
        self._fenced = True

    def turn(self) -> None:
        """Renew and check when due. Raises the errors of ``check``, except EnvironmentFailure."""
        self._fenced = self._fenced or not self._held()
        now = self._clock()
        if now >= self._next_beat:
            self._next_beat = now + self._beat_s
            if not self._try("renew the lease", self._beat):
                self._beaten_at, self._fenced = None, True
                return
            self._beaten_at = now
        if self._held() and (self._fenced or now >= self._next_check):
            self._next_check = now + self._check_s
            if self._try("read the history", self._check):
                self._fenced = False

    def may_start(self) -> bool:
        """Return whether this host may start new work now."""
        return not self._fenced and self._held()

    def _held(self) -> bool:
        return self._beaten_at is not None and self._clock() - self._beaten_at < self._ttl_s

    def _try(self, what: str, action: Callable[[], None]) -> bool:
        try:
            action()
        except EnvironmentFailure as error:
            logger.warning("cannot %s, will retry: %s", what, error)
            return False
        return True


class Leader:
    """Observes the lease of the trainers' first agent."""

    def __init__(
        self,
        paths: RunPaths,
        names: NameStore,
        identity: Identity,
        ttl_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._identity = identity
        look_s = ttl_s / GAPS_PER_TTL / 2
        self._looks = Interval(look_s, clock, after_s=look_s)
        self._first = FirstAgent(paths, names, ttl_s, clock)

    def look(self) -> None:
        """Read the lease when due. Raises ReportedError if the first agent's host is lost."""
        watches = self._identity.trains and 0 < self._identity.task <= WATCHERS
        if not watches or not self._looks.due():
            return
        claim = self._first.claim or self._first.try_to_find(self._identity.job)
        if claim is None or self._first.observe().alive:
            return
        reason = f"host {claim.host} and the master on it are lost: its agent's lease expired"
        raise ReportedError(Failure(cause=Cause.LOST_HOST, reason=reason, host=claim.host))


def leave_without(
    host: str,
    paths: RunPaths,
    submission: int,
    identity: Identity,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Requeue the job on behalf of its batch process, which was lost with ``host``.

    First wait for `GRACE_S`, because a batch process that is still alive ends this process.
    """
    waited_s = 0.0
    while waited_s < GRACE_S and usable_hosts([host], ()):
        sleep(LOOK_S)
        waited_s += LOOK_S
    requeue(Link.here(paths, submission, identity.group), sleep)


class TrainersLease:
    """Observes the lease of the first agent of the newest incarnation, by this host's clock."""

    def __init__(
        self,
        paths: RunPaths,
        names: NameStore,
        ttl_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._looks = Interval(ttl_s / GAPS_PER_TTL / 2, clock)
        self._first = FirstAgent(paths, names, ttl_s, clock)
        self._view = LeaseView(alive=True, age_s=0.0, counter=None)
        self._sought: str | None = None
        """Round of agents whose first agent is still unknown; None if it is known."""

    def follow(self, job: str) -> None:
        """Observe the first agent of a round that began a new incarnation."""
        self._sought = job

    def seen(self, incarnation: int) -> Orphaned:
        """Return a record of the last heartbeat. ``incarnation`` must be the newest incarnation."""
        counter = self._view.counter
        return Orphaned(incarnation=incarnation, attempt=self._first.attempt, counter=counter)

    def beat_since(self, seen: Orphaned) -> bool:
        """Return whether the trainers may have renewed their lease since ``seen``.

        Return True if the directory does not answer.
        """
        return self._first.lease(seen.attempt).observe().counter != seen.counter

    def gone_s(self) -> float:
        """Return the seconds since the last renewal of the lease, or 0 while the lease is valid.

        Read the lease when due. Time during which the directory did not answer does not count.
        """
        if self._looks.due():
            if self._sought is not None and self._first.try_to_find(self._sought) is not None:
                self._sought = None
            self._view = self._first.observe()
        return 0.0 if self._view.alive else self._view.age_s
