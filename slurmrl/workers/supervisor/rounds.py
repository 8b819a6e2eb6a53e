"""The rounds of a job: starts and restarts of its agents.

When an agent has exited, the supervisor restarts all agents on the usable hosts of the job. Later
jobs avoid hosts that repeatedly make incarnations or rollout tasks fail.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import FrameType

from slurmrl import env, log
from slurmrl.backoff import retry
from slurmrl.errors import CorruptFileError, EnvironmentFailure
from slurmrl.name_resolve.store import NameStore
from slurmrl.plan.model import Plan
from slurmrl.plan.placement import ROLLOUTS
from slurmrl.run.events import EventWriter
from slurmrl.run.history.slots import History
from slurmrl.run.history.state import fold
from slurmrl.run.hosts import BadHost, avoided, blame, blamed, failed_starts, guard_command
from slurmrl.run.paths import RunPaths
from slurmrl.run.reports import Cause, Failure
from slurmrl.scheduler import parse
from slurmrl.scheduler.client import SRUN, SlurmClient, usable_hosts
from slurmrl.scheduler.slurm import SlurmScheduler
from slurmrl.watch import published
from slurmrl.workers.child_process import die_with
from slurmrl.workers.link import reason_to_leave
from slurmrl.workers.polling import Presence
from slurmrl.workers.supervisor.tasks_inside import (
    AGENT,
    KEEP_S,
    SIGNALS,
    TasksInside,
    begin_next_attempt,
    signals_held_back,
    unblock,
)

logger = log.get(__name__)

FRUITLESS_ROUNDS = 2
"""Number of consecutive rounds without a new incarnation after which the job ends. Rollout tasks
begin no incarnations; their rounds of at least `SOUND_ROUND_S` do not count."""
SOUND_ROUND_S = 3600.0
"""Seconds after which the round of a rollout task counts as successful. Three failing starts of a
server take less time."""
LOOK_S = 15.0
"""Interval at which the supervisor looks for hosts that the master has reported lost."""
LOST_GRACE_S = 30.0
"""Seconds from the report of a lost host until the supervisor terminates srun."""
KILL_GRACE_S = 60.0
"""Seconds from TERM to KILL for srun. A hung srun would block all hosts of the job."""
CAUSES = (Cause.LOST_HOST, Cause.GPU_FAULT, Cause.ENVIRONMENT)
"""Causes of failures for which the host is to blame."""


@dataclass(frozen=True)
class JobHosts:
    """The hosts of a job, in Slurm's order; none without Slurm."""

    paths: RunPaths
    needed: int
    """Number of hosts that the group needs; the other hosts are spares."""
    hosts: tuple[str, ...] = ()
    end: float | None = None
    """Time at which the job reaches its time limit, by this host's clock."""
    job: str = ""
    """Job id and restart count."""

    @staticmethod
    def of_this_job(options: Namespace, paths: RunPaths) -> JobHosts:
        needed = Plan.read(paths.plan).group(options.group).hosts_of_job
        if options.launcher == "direct":
            return JobHosts(paths, needed)
        given = parse.hosts(env.NODE_LIST.get())
        job = f"{env.JOB_ID.get()}.{env.RESTART_COUNT.get()}"
        return JobHosts(paths, needed, given, _end_of_job(), job)

    def choose(self) -> tuple[str, ...] | None:
        """Return the hosts of the next round; None if too few usable hosts are left.

        Spares replace hosts that made an incarnation fail, for example because a mount is missing.
        If there are too few spares, reuse the hosts whose failures are the oldest.
        """
        failed = {start.host for start in self.failed_starts()}
        good = usable_hosts(self.hosts, self.lost() | failed)
        if len(good) < self.needed:
            return None
        failures = self._blamed()
        best = sorted(good, key=lambda host: failures.get(host, -1))[: self.needed]
        return tuple(host for host in good if host in best)

    def failed_starts(self) -> list[BadHost]:
        """Return the failed agent starts that the hosts of this job recorded since it started."""
        try:
            return failed_starts(self.paths, self.job)
        except (CorruptFileError, EnvironmentFailure) as error:
            logger.warning("cannot look for failed starts, will retry: %s", error)
            return []

    def _blamed(self) -> dict[str, int]:
        try:
            return blamed(self.paths)
        except EnvironmentFailure as error:
            logger.warning("cannot look for hosts that failed, will retry: %s", error)
            return {}

    def lost(self) -> set[str]:
        """Return the hosts that were reported lost since the job started."""
        try:
            names = NameStore(self.paths.names)
            return {host for host in self.hosts if self._is_lost(names, host)}
        except (EnvironmentFailure, CorruptFileError) as error:
            logger.warning("cannot look for lost hosts, will retry: %s", error)
            return set()

    def _is_lost(self, names: NameStore, host: str) -> bool:
        lost = published.lost(names, host)
        return lost is not None and lost.job.startswith(f"{self.job}.")


def _end_of_job() -> float | None:
    known = env.SLURM_END_TIME.get()
    if known is not None:
        return known
    try:
        left_s = SlurmClient().time_left_s(env.JOB_ID.get())
    except EnvironmentFailure as error:
        logger.info("cannot ask Slurm when this job ends: %s", error)
        return None
    return time.time() + left_s if left_s is not None else None


def agent_command(
    options: Namespace, hosts: Sequence[str] = (), *, overlap: bool = False
) -> list[str]:
    """Return the command that starts the agents on ``hosts``, or on all hosts of the job.

    With ``overlap``, the step may use resources that an earlier step has not released yet.
    """
    agent = [sys.executable, "-P", "-m", AGENT]
    agent += ["--run", str(options.run), "--submission", str(options.submission)]
    agent += ["--group", options.group]
    if options.launcher == "direct":
        return agent
    # --kill-on-bad-exit: the end of an agent ends the step. --no-kill: the step survives the loss
    # of a host, because agents on other hosts must requeue the job (agent/loss_detection.py).
    srun = [*SRUN, "--kill-on-bad-exit=1", "--no-kill"]
    if hosts:
        srun += [f"--nodelist={','.join(hosts)}", f"--nodes={len(hosts)}", f"--ntasks={len(hosts)}"]
    if overlap:
        srun.append("--overlap")
    return [*srun, *guard_command(options.run, sys.executable, AGENT), *agent]


class Rounds:
    """Runs the agents' process, forwards signals to it, and decides about the next round."""

    def __init__(
        self, options: Namespace, paths: RunPaths, allocation: JobHosts, tasks_per_host: int = 0
    ) -> None:
        """``tasks_per_host`` is the number of rollout tasks that this job runs on each host."""
        self.options = options
        self.paths = paths
        self.allocation = allocation
        self.events = EventWriter(paths, f"supervisor.{options.group}.{job_tag()}")
        self.tasks = TasksInside(
            options,
            job_tag(),
            self.events,
            allocation.needed,
            tasks_per_host,
            allocation.end,
            failed=self._blame_task,
        )
        self._is_task = options.group == ROLLOUTS
        self.child: subprocess.Popen[bytes] | None = None
        self.warned = False
        self.began = False
        """Whether an incarnation began in this job."""
        self.lost_host = False
        """Whether the job ends because too few of its hosts are left."""
        self._no_agents = ""
        """Reason why this host cannot run the command that starts the agents; empty if it can."""

    def run(self) -> int:
        """Run rounds to the end; return the exit code of the last round.

        The code of a signal is 128 plus its number. Return 0 if the trial has ended or another
        submission has taken over, even if srun failed.
        """
        for warning in SIGNALS:
            signal.signal(warning, self._relay)
        self.events.write("start", link=env.LINK.get(), job=job_tag(), hosts=self.allocation.hosts)
        code, why = 0, ""
        fruitless = 0
        for number in itertools.count():
            hosts = self.allocation.choose() if self.allocation.hosts else ()
            if hosts is None:
                code, why = code or 1, "too few hosts of this job are left"
                self.lost_host = True
                break
            before, began_at = self._incarnation(), time.monotonic()
            code = self._round(number, hosts)
            sound = self._is_task and time.monotonic() - began_at >= SOUND_ROUND_S
            Presence(self.paths).wait()
            after = self._incarnation()
            fruitless = 0 if after > before or sound else fruitless + 1
            self.began |= after > before
            if self.allocation.hosts:
                if not self._is_task:
                    blame_hosts(self.paths, self.options, range(before, after + 1))
                avoid_failed(self.paths, self.options, self.allocation.failed_starts())
            if self._is_task and code != 0:
                self._blame_task(env.LINK.get())
            reason = self._reason_to_leave(code, fruitless)
            if reason is not None:
                why = reason
                break
            if self._is_task:
                begin_next_attempt(self.paths, ROLLOUTS, env.LINK.get(), job_tag())
        if reason_to_leave(self.paths, self.options.submission) is not None:
            code = 0
        self.tasks.end()
        logger.info("this supervisor exits after round %d: %s", number, why)
        self.events.write("end", code=code, why=why)
        return code

    def _blame_task(self, task: int) -> None:
        """Record the host of a rollout task if it made the task's newest attempt fail."""
        if not self.allocation.hosts:
            return
        try:
            names = NameStore(self.paths.names)
            claim = published.newest_claim(names, ROLLOUTS, task, job_tag())
            if claim is None:
                return
            attempt = task, claim.attempt
            failure = published.attempt_failure(names, ROLLOUTS, *attempt)
            _blame(self.paths, self.options, failure, self._incarnation(), attempt)
        except (CorruptFileError, EnvironmentFailure) as error:
            logger.warning("cannot record why %s/%d failed: %s", ROLLOUTS, task, error)

    def failed_start(self) -> tuple[str, str]:
        """Return why no incarnation began in this job, and the host to blame.

        The host is empty if it is unknown or already recorded.
        """
        if self._no_agents:
            return self._no_agents, env.NODE_NAME.get()
        starts = self.allocation.failed_starts()
        if starts:
            return f"on {starts[-1].host}: {starts[-1].why}", ""
        alone = self.allocation.hosts if len(self.allocation.hosts) == 1 else ("",)
        return "its agents ended before an incarnation began; see their logs", alone[0]

    def _reason_to_leave(self, code: int, fruitless: int) -> str | None:
        if code == 0:
            return "the agents have ended normally"
        if self.warned:
            return "this job will end soon"
        if self._no_agents:
            return self._no_agents
        if self.tasks.spent:
            return "its rollout tasks have failed too often"
        if fruitless >= FRUITLESS_ROUNDS:
            return f"the last {fruitless} rounds all failed"
        return reason_to_leave(self.paths, self.options.submission)

    def _incarnation(self) -> int:
        history = History(self.paths.history)
        return retry("read the history", lambda: fold(history.read()).incarnation)

    # -- one round ---------------------------------------------------------------------------

    def _round(self, number: int, hosts: Sequence[str]) -> int:
        logger.info("round %d begins%s", number, f" on {', '.join(hosts)}" if hosts else "")
        self.events.write("round", round=number, hosts=list(hosts))
        child = self._start(number, hosts)
        if child is None:
            return 1
        self.tasks.start(hosts)
        end_at = None
        while (code := self._wait(child)) is None:
            if not self.warned:
                self.tasks.keep(hosts)
            lost = len(hosts) > 1 and set(hosts) & self.allocation.lost()
            if end_at is None and (lost or self.tasks.spent):
                end_at = time.monotonic() + LOST_GRACE_S
            if end_at is not None:
                self._end(child, time.monotonic() - end_at)
        return code if code >= 0 else 128 - code

    def _end(self, child: subprocess.Popen[bytes], late_s: float) -> None:
        """Terminate the agents' process once its grace period is over."""
        if late_s >= KILL_GRACE_S:
            logger.warning(
                "srun (pid %d) did not end after a host was lost: sending KILL", child.pid
            )
            self.events.write("killed", pid=child.pid, why="srun did not end after TERM")
            child.kill()  # srun's second process then ends the step.
            child.wait()
        elif late_s >= 0:
            child.terminate()  # On TERM, srun ends its step.

    def _start(self, number: int, hosts: Sequence[str]) -> subprocess.Popen[bytes] | None:
        """Start the agents' process. Block signals until they can be forwarded to it.

        Return None if a signal has already arrived or the process cannot start.
        """
        direct = self.options.launcher == "direct"
        end = self.allocation.end
        environ = {env.ROUND.name: str(number), env.JOB_END.name: "" if end is None else str(end)}
        parent = os.getpid()
        with signals_held_back():
            if self.warned or set(signal.sigpending()) & set(SIGNALS):
                return None
            command = agent_command(self.options, hosts, overlap=number > 0)
            try:
                self.child = subprocess.Popen(
                    command,
                    env={**os.environ, **environ},
                    preexec_fn=(lambda: die_with(parent)) if direct else unblock,
                )
            except OSError as error:
                self._no_agents = (
                    f"{command[0]} cannot start ({os.strerror(error.errno or 0)}): look at PATH "
                    "in cluster.env, cluster.variables_file and cluster.slurm.setup"
                )
                logger.error("%s", self._no_agents)
                return None
            return self.child

    def _wait(self, child: subprocess.Popen[bytes]) -> int | None:
        """Wait for the child; return its exit code, or None after a limited wait.

        The wait has a limit only if the job has several hosts, which may be lost, or rollout tasks,
        which must be restarted after failures.
        """
        look_s = LOOK_S if len(self.allocation.hosts) > 1 else None
        try:
            return child.wait(KEEP_S if self.tasks else look_s)
        except subprocess.TimeoutExpired:
            return None

    def _relay(self, number: int, frame: FrameType | None) -> None:
        """Forward a signal to the agents.

        Under srun, forward only the warning, because Slurm sends TERM to all tasks of a step.
        """
        self.warned = True
        if number != signal.SIGUSR2 and self.options.launcher != "direct":
            return
        self.tasks.forward(number)
        if self.child is not None:
            self.child.send_signal(number)


def job_tag() -> str:
    return f"{env.JOB_ID.get() or os.getpid()}.{env.RESTART_COUNT.get()}"


def _avoid(paths: RunPaths, options: Namespace, host: str, why: str) -> None:
    """Exclude a host from later jobs, unless it is excluded or too few hosts would be left."""
    if host not in {one.host for one in avoided(paths)}:
        SlurmScheduler().avoid(paths, options.submission, options.group, host, why)


def avoid_failed(paths: RunPaths, options: Namespace, starts: Iterable[BadHost]) -> None:
    """Exclude the hosts on which an agent could not start."""
    try:
        for bad in starts:
            if bad.host:
                _avoid(paths, options, bad.host, bad.why)
    except (CorruptFileError, EnvironmentFailure) as error:
        logger.warning("cannot exclude failing hosts: %s", error)


def blame_hosts(paths: RunPaths, options: Namespace, incarnations: Iterable[int]) -> None:
    """Record the hosts that made these incarnations fail; exclude them as `_blame` does."""
    try:
        names = NameStore(paths.names)
        failures = [(number, published.failure(names, number)) for number in incarnations]
        for number, failure in failures:
            _blame(paths, options, failure, number)
    except (CorruptFileError, EnvironmentFailure) as error:
        logger.warning("cannot record host failures: %s", error)


def _blame(
    paths: RunPaths,
    options: Namespace,
    failure: Failure | None,
    incarnation: int,
    attempt: tuple[int, int] | None = None,
) -> None:
    """Record the host that made an incarnation or an attempt at a rollout task fail.

    Exclude a host that is already recorded for another failure, or whose GPU has certainly failed.
    Raises CorruptFileError, EnvironmentFailure.
    """
    if failure is None or failure.cause not in CAUSES or not failure.host:
        return
    if failure.echo:  # After a lost connection, it is unknown which host has failed.
        return
    again = blame(paths, failure.host, incarnation, failure.reason, attempt)
    if again or failure.certain:
        _avoid(paths, options, failure.host, failure.reason)
