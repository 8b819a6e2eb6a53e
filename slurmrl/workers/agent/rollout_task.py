"""Supervise the workers of a rollout task, which serve successive incarnations of the trainers.

The workers outlive the trainers' incarnations. The agent only supervises the workers: it sends them
new incarnations, tells them when to retire, and checks whether workers and trainers are alive. The
agent neither ends nor delays an incarnation.
"""

from __future__ import annotations

import math
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from slurmrl import log
from slurmrl.backoff import Interval, retry
from slurmrl.errors import (
    EnvironmentFailure,
    ReportedError,
    SlurmrlError,
    TrialEndedError,
    WaitTimeoutError,
)
from slurmrl.fsio import atomic, documents
from slurmrl.fsio.calls import explain
from slurmrl.run.channel.wakeups import LOOPBACK, interface_of
from slurmrl.run.reports import Cause, Failure, Warned
from slurmrl.scheduler.submission import Orphaned, newest_submission, read_orphaned, write_orphaned
from slurmrl.workers.agent.agent_host import Host
from slurmrl.workers.agent.children import News
from slurmrl.workers.agent.loss_detection import Symptoms, TrainersLease
from slurmrl.workers.agent.witness import Witness
from slurmrl.workers.failure import publish_attempt
from slurmrl.workers.messages import Ready, Retire, Serve, StartRollout
from slurmrl.workers.polling import LOOK_S

logger = log.get(__name__)
T = TypeVar("T")

ORPHAN_RETIRE_S = 60.0
"""Seconds that workers may take to retire without trainers. They do not finish their items."""
EXIT_TIMEOUT_S = 60.0
"""Maximum wait for the other ranks after one rank has exited normally."""
FOLDER_GONE_S = 60.0
"""Seconds for which an attempt's directory or log must be missing until the attempt counts as lost.
The master may remove the directory after a worker's last message: the worker exits sooner."""
MARGIN_S = 10.0
"""Seconds before the end of the job at which the agent kills remaining workers."""
SHORT_S = 20.0
"""Seconds that workers may take to retire if the time of the job's end is unknown. By default,
Slurm waits 30 s between TERM and KILL."""
TURN_S = 0.5
"""Maximum wait for an event of a worker, so that the agent soon reacts to signals."""


class RolloutTask:
    """The attempt at a rollout task that ``host`` has claimed."""

    def __init__(
        self, host: Host, *, orphan_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Prepare a task that retires when the trainers have been missing for ``orphan_s`` seconds.

        ``orphan_s`` is infinite in the trainers' job, because the task ends with this job anyway.
        """
        self.host = host
        self._orphan_s = orphan_s
        self._clock = clock
        self._trainers = TrainersLease(host.paths, host.names, host.cluster.lease_ttl_s, clock)
        self._looks = Interval(host.intervals.check_s, clock)
        identity = host.identity
        self._folder = host.paths.rollout_task(identity.group, identity.task, identity.attempt)
        self._folder_looks = Interval(max(LOOK_S, host.intervals.check_s), clock)
        self._gone_since: float | None = None
        self._logs: set[Path] = set()
        """Logs that have been found in the directory."""
        self._symptoms = Symptoms(
            host.identity.host,
            host.children,
            host.oom,
            host.cluster.silence_s,
            output=host.outputs[0].newest_after_now(),
        )
        self._ready: set[int] = set()
        self._retired = False
        """Whether a worker has exited normally, because this process or the master requested it."""
        self._told = False
        """Whether this process has told the workers to retire."""
        self._deadline = math.inf
        """Time at which this process kills workers that have not retired."""

    def run(self) -> None:
        """Supervise the workers until they have retired and exited.

        Raises TrialEndedError, RunGoneError, and other SlurmrlErrors for failures on this host (see
        `fail`).
        """
        if self._is_orphaned():
            return
        self._start()
        while not (self._retired and self.host.children.all_ended()):
            self._follow()
            self._look_at_trainers()
            self._look_at_folder()
            self._heed_warning()
            self._keep_deadline()
            self.turn(TURN_S)
        logger.info("the workers of this task have retired")
        if self.host.inside and not self._told:  # The supervisor must start this task again.
            raise _lost("the master told it to exit")

    def _is_orphaned(self) -> bool:
        """Return whether an earlier task has already found that the trainers are gone."""
        if math.isinf(self._orphan_s):
            return False
        host = self.host
        seen = self._retry("look for trainers", self._seen_before)
        if seen is None or self._trainers.beat_since(seen):
            return False
        logger.info("nothing to do: the trainers are gone, as an earlier task found")
        host.events.write("retire", reason="the trainers are gone", within_s=0.0)
        return True

    def _seen_before(self) -> Orphaned | None:
        host = self.host
        seen = read_orphaned(host.paths, host.group.name)
        newest = host.state().incarnation
        return seen if seen is not None and seen.incarnation == newest else None

    def _start(self) -> None:
        """Start the workers, which are all on this host, and let them connect to each other."""
        host, identity = self.host, self.host.identity
        devices = host.devices()
        self._retry("make a directory", lambda: atomic.make_private_directory(self._folder))
        with self._retry("open a log", lambda: host.open_log(identity.group)) as output:
            host.children.start_workers(devices, output)
        start = StartRollout(
            world_size=host.group.world_size,
            interface=interface_of(LOOPBACK),
            exclusive=host.deals_gpus,
            submission=host.submission,
            agent=identity,
        )
        for slot in host.children.slots:
            slot.send(start)

    # -- incarnations ------------------------------------------------------------------------

    def _follow(self) -> None:
        """Look for a newer incarnation, when due, and send it to the workers.

        Raises TrialEndedError if the trial has ended, or if a newer submission with its own tasks
        has taken over.
        """
        if not self._looks.due():
            return
        host = self.host
        try:
            state = host.state()
            newest = newest_submission(host.paths) if state.incarnation > host.serving else None
        except EnvironmentFailure as error:
            logger.warning("cannot look for a new incarnation, will retry: %s", error)
            return
        if newest is not None and newest.number > host.submission:
            raise TrialEndedError(f"a newer submission has superseded submission {host.submission}")
        if state.incarnation > host.serving:
            host.serving = state.incarnation
            logger.info("this task now serves incarnation %d", state.incarnation)
            gpus = {"gpus": host.devices()} if host.group.gpus_per_worker else {}
            host.events.write("join", incarnation=state.incarnation, **gpus)
            host.children.broadcast(Serve(incarnation=state.incarnation))
            self._trainers.follow(str(state.begin_data.get("job")))

    def _look_at_trainers(self) -> None:
        gone_s = self._trainers.gone_s()
        if gone_s >= self._orphan_s and self._deadline == math.inf:
            self._retire(f"the trainers have been gone for {gone_s:.0f} s", ORPHAN_RETIRE_S)
            self._record_orphan()

    def _record_orphan(self) -> None:
        """Record that the trainers are gone, so that later tasks do not wait for them."""
        host = self.host
        try:
            write_orphaned(host.paths, host.group.name, self._trainers.seen(host.serving))
        except EnvironmentFailure as error:
            logger.warning("cannot record missing trainers; later tasks will also wait: %s", error)

    def _look_at_folder(self) -> None:
        """Raise, when due, if the directory of this attempt or a log in it is missing or replaced.

        Without these, the task and the master cannot exchange messages. The master removes the
        directory after it gave up this attempt, for example because this host was suspended. A user
        may also remove files.
        """
        if not self._folder_looks.due():
            return
        try:
            missing = self._missing()
        except EnvironmentFailure as error:
            logger.warning("cannot look at %s, will retry: %s", self._folder, error)
            return
        if missing is None:
            self._gone_since = None
            return
        now = self._clock()
        if self._gone_since is None:
            self._gone_since = now
        if now - self._gone_since >= FOLDER_GONE_S:
            raise _lost(f"{missing} was removed or replaced")

    def _missing(self) -> Path | None:
        """Return a directory or log that was removed or replaced, or None.

        Raises EnvironmentFailure.
        """
        kind, owner = _kind(self._folder)
        if kind != stat.S_IFDIR:
            return self._folder
        identity = self.host.identity
        place = (identity.group, identity.task, identity.attempt)
        paths = self.host.paths
        requests = paths.rollout_requests(*place, self.host.serving)
        samples = paths.rollout_samples(*place)  # The worker recreates a removed directory.
        if _kind(samples) not in ((0, 0), (stat.S_IFDIR, owner)):
            return samples
        logs = (paths.rollout_results(*place), requests)
        sound = {path for path in logs if _kind(path) == (stat.S_IFREG, owner)}
        self._logs |= sound
        return next((path for path in logs if path in self._logs - sound), None)

    def _heed_warning(self) -> None:
        if (warned := self.host.warnings.take()) is not None:
            self.host.events.write("warned", **documents.to_json(warned))
            self._retire(f"its job will end ({warned.cause})", time_to_retire_s(warned))

    # -- end of the attempt ------------------------------------------------------------------

    def _retire(self, reason: str, within_s: float) -> None:
        """Tell the workers to retire, unless they already have an earlier deadline."""
        deadline = self._clock() + within_s
        if deadline >= self._deadline:
            return
        self._told = True
        logger.info("the workers must exit within %.0f s: %s", within_s, reason)
        self.host.events.write("retire", reason=reason, within_s=within_s)
        self.host.children.broadcast(Retire(reason=reason, within_s=within_s))
        self._expect_exit(deadline)

    def _expect_exit(self, deadline: float) -> None:
        self._symptoms.told_to_exit = True
        self._deadline = min(self._deadline, deadline)

    def _keep_deadline(self) -> None:
        if self._clock() >= self._deadline:
            raise WaitTimeoutError("the workers did not exit in time; this agent kills them")

    def fail(self, error: SlurmrlError) -> Failure:
        """Record a failure of this task, with the stacks of its workers after a hang.

        Do not publish failures of retiring workers. Such workers would have exited anyway.
        """
        host, failure = self.host, self.host.describe(error)
        host.write_failure(host.serving, failure)
        if not self._told:
            self._publish(failure)
        if failure.cause == Cause.HUNG:
            Witness(host).take(host.serving, 0, failure.reason, host.idle)
        return failure

    def _publish(self, failure: Failure) -> None:
        try:
            publish_attempt(self.host.names, self.host.identity, failure)
        except EnvironmentFailure as error:
            logger.warning("cannot publish why this task failed: %s", error)

    # -- one turn of the loop ----------------------------------------------------------------

    def _retry(self, what: str, action: Callable[[], T]) -> T:
        return retry(what, action, self.turn)

    def turn(self, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` for an event of a worker; renew the lease when due."""
        host = self.host
        host.presence.check()
        host.lease_guard.turn()
        for output in host.outputs:
            output.look()
        news = host.children.turn(min(timeout_s, self._symptoms.longest_turn_s))
        self._take(news)
        self._symptoms.evaluate(news)

    def _take(self, news: News) -> None:
        for message in news.received:
            if isinstance(message, Ready):
                self._ready.add(message.rank)
                if len(self._ready) == self.host.group.world_size:
                    self.host.events.write("world_ready", world=self.host.identity.world)
        if any(ended.code == 0 for ended in news.ended):
            self._retired = True
            self._expect_exit(self._clock() + EXIT_TIMEOUT_S)


def _kind(path: Path) -> tuple[int, int]:
    """Return type and owner of a file, or (0, 0) if it is missing. Raises EnvironmentFailure."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return 0, 0
    except OSError as error:
        raise explain(error, "look at", path) from error
    return stat.S_IFMT(found.st_mode), found.st_uid


def _lost(why: str) -> SlurmrlError:
    """Return the error for an attempt that the master has given up."""
    reason = f"the trainers get no more results of this rollout task: {why}"
    return ReportedError(Failure(cause=Cause.ENVIRONMENT, reason=reason, host=""))


def time_to_retire_s(warned: Warned) -> float:
    """Return the seconds that workers may take to retire after a warning.

    After a preemption, this is `SHORT_S`: the grace time of Slurm's partition is unknown here.
    """
    left_s = warned.time_left_s
    if warned.cause != "time_limit" or left_s is None:
        return SHORT_S
    return max(left_s - MARGIN_S, SHORT_S)
