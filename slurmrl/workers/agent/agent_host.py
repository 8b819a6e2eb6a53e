"""The state that an agent keeps over incarnations: task, lease, processes, output and warnings."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import IO

from slurmrl import env, log
from slurmrl.config.load import load_resolved
from slurmrl.config.schema.rollout import Tasks
from slurmrl.display.terminal import signal_name
from slurmrl.errors import (
    EnvironmentFailure,
    NameExistsError,
    SlurmrlError,
    StaleIncarnationError,
    TrialEndedError,
)
from slurmrl.fsio import atomic, documents
from slurmrl.fsio.calls import REAL, opened
from slurmrl.name_resolve.store import NameStore
from slurmrl.plan.model import Plan
from slurmrl.plan.placement import slurm_of
from slurmrl.run import keys
from slurmrl.run.channel import message_log
from slurmrl.run.events import EventWriter
from slurmrl.run.hang import LeaseNote
from slurmrl.run.history.slots import History, Kind
from slurmrl.run.history.state import TrialState, fold
from slurmrl.run.lease import Lease
from slurmrl.run.paths import RunPaths, rotated
from slurmrl.run.reports import MASTER, Failure, Identity, Warned
from slurmrl.scheduler.submission import stop_requested_by
from slurmrl.tensors.parallel import gpu
from slurmrl.watch import log_files
from slurmrl.workers.agent import fork_environment
from slurmrl.workers.agent.children import Children
from slurmrl.workers.agent.loss_detection import Leader, LeaseGuard, OomKills
from slurmrl.workers.failure import failure_of
from slurmrl.workers.polling import LOOK_S, PollIntervals, Presence

logger = log.get(__name__)
SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
LATE_S = 90.0
"""Maximum seconds by which a warning may come early: 60 s according to Slurm's documentation, plus
30 s for a busy host."""
SHARE = 4
"""Divisor of a task's output limit. The output file and its previous part may each take 1/SHARE of
the limit; the remaining space is for earlier attempts and stacks."""
SHORTEST_LOOK_S = 1.0
NEWEST_BYTES = 256 * 1024


class Host:
    """The state of an agent. Raises SlurmrlError if the agent cannot start on this host."""

    def __init__(
        self, paths: RunPaths, submission: int, group: str, task: int | None = None
    ) -> None:
        """``task`` is the number of a rollout task in the trainers' job, else None."""
        self.paths = paths
        self.inside = task is not None
        """Whether this is a rollout task in the trainers' job."""
        self.submission = submission
        config = load_resolved(paths.config)
        self.cluster = config.cluster
        self.slurm = slurm_of(config, group)
        self.most_failures = config.max_restarts_without_commit
        self.orphan_s = math.inf if self.inside else (config.rollout.tasks or Tasks()).orphan_s
        self.plan = Plan.read(paths.plan)
        self.group = self.plan.group(group)
        self.history = History(paths.history)
        self.names = NameStore(paths.names)
        self.identity = claim(self.names, group, elastic=self.group.elastic, task=task)
        self.intervals = PollIntervals.of(self.plan.hosts, self.cluster.heartbeat_s)
        lease = paths.lease(group, self.identity.task, self.identity.attempt)
        self.serving = 0
        """Number of the current incarnation; 0 between two incarnations. For a rollout task, the
        number of the newest incarnation."""
        self._lease = Lease(lease)
        self.lease_guard = LeaseGuard(
            self._beat,
            self.check_fence,
            beat_s=self.intervals.beat_s,
            check_s=self.intervals.check_s,
            ttl_s=self.cluster.lease_ttl_s,
        )
        self.leader = Leader(paths, self.names, self.identity, self.cluster.lease_ttl_s)
        self.presence = Presence(paths, look_s=max(LOOK_S, self.intervals.check_s))
        capability = gpu.compute_capability() if self.group.gpus_per_worker else None
        defaults = fork_environment.defaults(self.plan, capability)
        self.children = Children(paths, self.group, self.identity, self.cluster, defaults)
        self.local = _is_local(paths, submission)
        self.warnings = Warnings(
            local=self.local, lead_s=self.slurm.signal_lead_s, stopped=self._is_stopped
        )
        self.oom = OomKills()
        self.outputs = self._outputs(config.logging.output_mib << 20)
        writer = f"agent.{group}.{self.identity.task}.{self.identity.attempt}"
        self.events = EventWriter(paths, writer)

    def _is_stopped(self) -> bool:
        """Return whether a user has stopped this submission; False if the directory fails."""
        try:
            return bool(stop_requested_by(self.paths, self.submission))
        except EnvironmentFailure as error:
            logger.warning("cannot determine whether a user has stopped the trial: %s", error)
            return False

    def _beat(self) -> None:
        """Renew the lease with the activity of the ranks, which `slurmrl status` shows."""
        doing = tuple(self.children.doing()) if self.serving else ()
        note = LeaseNote(incarnation=self.serving, doing=doing)
        self._lease.beat(message_log.encode(documents.to_json(note)))

    def _outputs(self, limit_bytes: int) -> list[Output]:
        groups = [self.group.name, *([MASTER] if self.leads else [])]
        outputs = [Output(self._log(name), limit_bytes, self.intervals.check_s) for name in groups]
        for output in outputs:
            output.prune()
        return outputs

    @property
    def leads(self) -> bool:
        """Whether the master runs on this host."""
        return self.identity.trains and self.identity.task == 0

    @property
    def deals_gpus(self) -> bool:
        """Whether the scheduler assigns each GPU to only one job."""
        return not self.local and self.slurm.gpu_directive != "none"

    def devices(self) -> list[str]:
        """Return CUDA_VISIBLE_DEVICES of each worker. Raises EnvironmentFailure."""
        workers, per_worker = self.group.workers_per_host, self.group.gpus_per_worker
        first = 0
        if self.inside:  # The first GPUs belong to the trainers and to tasks with lower numbers.
            trainers = self.plan.trainers
            before = self.identity.task % trainers.tasks_per_host * workers * per_worker
            first = trainers.workers_per_host * trainers.gpus_per_worker + before
        given = os.environ.get("CUDA_VISIBLE_DEVICES")
        if given is None and not self.deals_gpus:  # No scheduler assigns GPUs: count them.
            given = ",".join(map(str, range(first + workers * per_worker)))
        return gpu.assign(given or "", workers, per_worker, first)

    def open_log(self, group: str) -> IO[bytes]:
        """Open the log of this task, or of the ``master``. Raises EnvironmentFailure."""
        return atomic.open_log(self._log(group))

    def _log(self, group: str) -> Path:
        return self.paths.log(group, self.identity.task, self.identity.attempt)

    def begun(self, after: int) -> TrialState | None:
        """Return the trial's state if this job has begun an incarnation newer than ``after``.

        Raises TrialEndedError, EnvironmentFailure, and StaleIncarnationError if another job has
        begun a newer incarnation.
        """
        state = self.state()
        if self._superseded(state, after):
            raise StaleIncarnationError(f"another job has begun incarnation {state.incarnation}")
        return state if self._ours(state) and state.incarnation > after else None

    def superseded(self, after: int) -> bool:
        """Return whether another job has begun an incarnation newer than ``after``.

        Raises TrialEndedError, EnvironmentFailure.
        """
        return self._superseded(self.state(), after)

    def _superseded(self, state: TrialState, after: int) -> bool:
        """Return whether another job has begun a newer incarnation; False if ``after`` is 0.

        Before the first incarnation of this job, ``after`` is 0, because the newest incarnation may
        belong to the previous job.
        """
        return 0 < after < state.incarnation and not self._ours(state)

    def _ours(self, state: TrialState) -> bool:
        """Return whether this job began the newest incarnation."""
        return bool(state.begin_data.get("job") == self.identity.job)

    def state(self) -> TrialState:
        """Return the state of a running trial. Raises TrialEndedError, EnvironmentFailure."""
        state = fold(self.history.read())
        if state.end is not None:
            raise TrialEndedError(f"the trial has ended ({state.end.kind}); nothing to do")
        return state

    def check_fence(self) -> None:
        """Raise an error if the incarnation must end. Rollout tasks ignore ends of incarnations.

        Raises:
            StaleIncarnationError: a newer incarnation has begun.
            TrialEndedError: the trial was canceled or failed. After a finished trial, the control
                log contains ``exit`` instead.
            EnvironmentFailure: the history cannot be read.
        """
        if self.serving == 0 or not self.identity.trains:
            return
        state = fold(self.history.read())
        if state.incarnation > self.serving:
            raise StaleIncarnationError(f"incarnation {state.incarnation} has begun")
        finished = state.end is not None and state.end.kind is Kind.FINISHED
        if state.ended_slot > state.begin_slot and not finished:
            how = "and was resumed afterwards" if state.end is None else f"({state.end.kind})"
            raise TrialEndedError(f"the trial has ended {how}")

    def describe(self, error: SlurmrlError) -> Failure:
        """Log an error and return it as a failure of this host."""
        failure = failure_of(error, f"{self.identity.label} on {self.identity.host}")
        if failure.host is None:
            failure = replace(failure, host=self.identity.host)
        logger.error("%s", failure.reason)
        return failure

    def write_failure(self, incarnation: int, failure: Failure) -> None:
        """Write a failure as an event."""
        rank = {} if failure.rank is None else {"rank": failure.rank}
        short = {"cause": failure.cause, "reason": failure.reason, **rank}
        self.events.write("failure", incarnation=incarnation, **short)

    def renew_lease(self) -> None:
        """Renew the lease when due. Ignore errors, because the incarnation has already ended."""
        with suppress(SlurmrlError):
            self.lease_guard.turn()

    def idle(self, seconds: float) -> None:
        """Wait for events of the processes. Ignore failures, because their work is done."""
        self.renew_lease()
        self.children.turn(seconds)

    def close(self) -> None:
        """End all processes of this host."""
        self.children.close(self.renew_lease)


def _is_local(paths: RunPaths, submission: int) -> bool:
    """Return whether this submission went to the local scheduler."""
    path = paths.submission_request(submission)
    try:
        return bool(documents.read(path).get("scheduler") == "local")
    except FileNotFoundError:
        return False


def job_name(environ: Mapping[str, str]) -> str:
    array = env.ARRAY_JOB_ID.get(environ)
    return f"{array}_{env.LINK.get(environ)}" if array else env.JOB_ID.get(environ)


def claim(
    store: NameStore,
    group: str,
    *,
    elastic: bool,
    task: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Identity:
    """Claim the next attempt at ``task``; None means the task of this array element or host."""
    if task is None:
        task = env.LINK.get(environ) if elastic else env.NODE_ID.get(environ)
    start = f"{env.RESTART_COUNT.get(environ)}.{env.ROUND.get(environ)}"
    job = f"{env.JOB_ID.get(environ) or os.getpid()}.{start}"
    host = env.NODE_NAME.get(environ) or socket.gethostname()
    taken = len(store.find_subtree(keys.attempts(group, task)))
    for attempt in itertools.count(taken):
        identity = Identity(group, task, attempt, host, job, job_name(environ), os.getpid())
        try:
            store.add(keys.attempt(group, task, attempt), json.dumps(documents.to_json(identity)))
        except NameExistsError:
            continue
        return identity
    raise AssertionError("unreachable: attempts are unbounded")


class Warnings:
    """Receiver of signals that warn of the job's end. Call `listen` first.

    ``lead_s`` is the requested time between the scheduler's warning and the time limit. ``stopped``
    returns whether a user has stopped the trial.
    """

    def __init__(
        self,
        *,
        local: bool,
        lead_s: float,
        stopped: Callable[[], bool],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._local = local
        self._lead_s = lead_s
        self._stopped = stopped
        self._clock = clock
        self._first: int | None = None
        self._told = False

    def listen(self) -> None:
        for number in SIGNALS:
            signal.signal(number, self._receive)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # blocked by the supervisor

    @property
    def received(self) -> bool:
        return self._first is not None

    def take(self) -> Warned | None:
        """Return the first warning once. Return None before the warning and in later calls."""
        if self._first is None or self._told:
            return None
        self._told = True
        warned = self._explain(signal_name(self._first))
        logger.info("received %s (%s): this job will end soon", warned.signal, warned.cause)
        return warned

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._first is None:
            self._first = number

    def _explain(self, name: str) -> Warned:
        if self._local or self._stopped():
            return Warned(signal=name, cause="interrupt")
        end = env.JOB_END.get()
        if end is None:
            return Warned(signal=name, cause="unknown")
        left_s = end - self._clock()
        # Slurm sends USR2 before the time limit, and TERM at the limit.
        lead_s = self._lead_s if name == "SIGUSR2" else 0.0
        cause = "time_limit" if left_s <= lead_s + LATE_S else "preemption"
        return Warned(signal=name, cause=cause, time_left_s=round(left_s, 1))


class Output:
    """The output file of an attempt at a task. The agent rotates the file to bound its size.

    Processes append to the file directly (O_APPEND). Rotation therefore cannot block the processes,
    and their last lines are in the file even if the agent is dead. If the file is too long, the
    agent copies the newest part to ``.1`` and truncates the file. Output that a process writes in
    the microseconds between copy and truncation is lost.
    """

    def __init__(
        self,
        path: Path,
        limit_bytes: int,
        look_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Limit all files of the task to ``limit_bytes``; check at least every ``look_s``."""
        self.path = path
        self._limit_bytes = limit_bytes
        self._look_s = look_s
        self._clock = clock
        self._looked_at = self._next_look = clock()
        self._size = 0
        self._part = 1

    def look(self) -> None:
        """Rotate the file if a check is due and the file is too long."""
        now = self._clock()
        if now < self._next_look:
            return
        most = self._limit_bytes // SHARE
        try:
            size = REAL.stat(self.path).st_size
            if size > most:
                self._rotate(most)
                self._prune()
                size = 0
        except FileNotFoundError:
            size = 0
        except (OSError, EnvironmentFailure) as error:
            logger.warning("cannot rotate the output in %s, will retry: %s", self.path, error)
            size = self._size
        self._plan(now, size, most)

    def newest_after_now(self) -> Callable[[], str]:
        """Return a function that reads the newest output written after this call.

        The function returns at most NEWEST_BYTES, or an empty string after a read error.
        """
        begin = self.path.stat().st_size if self.path.exists() else 0

        def newest() -> str:
            try:
                with opened(self.path, os.O_RDONLY | os.O_NOFOLLOW, REAL) as file:
                    size = os.fstat(file).st_size
                    start = max(begin if begin <= size else 0, size - NEWEST_BYTES)
                    return os.pread(file, NEWEST_BYTES, start).decode(errors="replace")
            except OSError:
                return ""

        return newest

    def _plan(self, now: float, size: int, most: int) -> None:
        """Schedule the next check, sooner if the file grows faster."""
        passed_s = max(now - self._looked_at, 1e-3)
        bytes_per_s = (size - self._size) / passed_s
        half_full_s = (most - size) / bytes_per_s / 2 if bytes_per_s > 0 else self._look_s
        self._next_look = now + min(self._look_s, max(SHORTEST_LOOK_S, half_full_s))
        self._looked_at, self._size = now, size

    def _rotate(self, most: int) -> None:
        older = rotated(self.path)
        with opened(self.path, os.O_RDWR | os.O_NOFOLLOW, REAL) as file:
            size = os.fstat(file).st_size
            skipped = max(size - most, 0)
            data = os.pread(file, most, skipped)
            head = log_files.head(self._part, skipped) if skipped else b""
            try:
                atomic.replace(older, head + data, durable=False)
                atomic.append(older, os.pread(file, most, skipped + len(data)))
            except EnvironmentFailure as error:
                logger.warning("cannot keep the earlier part of %s: %s", self.path, error)
                atomic.remove(older)
            os.ftruncate(file, 0)
        self._part += 1
        atomic.append(self.path, log_files.head(self._part, 0))

    def prune(self) -> None:
        """Remove the oldest files of earlier attempts until the rest is within the limit."""
        try:
            self._prune()
        except FileNotFoundError:
            return  # Before the first attempt, there is no directory.
        except (OSError, EnvironmentFailure) as error:
            logger.warning("cannot remove old output next to %s: %s", self.path, error)

    def _prune(self) -> None:
        task = self.path.name.partition(".")[0]
        pattern = re.compile(rf"{task}\.(\d+)\..+")
        files = []
        for name in atomic.list_names(self.path.parent):
            match = pattern.fullmatch(name)
            if match and name not in (self.path.name, rotated(self.path).name):
                stat = REAL.stat(self.path.with_name(name))
                files.append((int(match[1]), stat.st_mtime, name, stat.st_size))
        total = sum(size for *_, size in files)
        for _, _, name, size in sorted(files):
            if total <= self._limit_bytes // 2:
                return
            atomic.remove(self.path.with_name(name))
            total -= size
