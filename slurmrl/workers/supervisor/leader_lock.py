"""The leader lock: decides which of several live jobs continues a trial.

Several jobs are alive at once if an array's throttle was lifted, a batch script was submitted by
hand, or Slurm started a link while another one has lost a host. Jobs take over one after the other,
each by an exclusive add of the next number. The newest holder keeps the trial while Slurm reports
that this start of its job runs. If Slurm does not answer, it keeps the trial while its first agent
renews its lease.

A job that does not hold the lock neither trains nor uses up its link.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace

from slurmrl import log
from slurmrl.backoff import retry
from slurmrl.errors import EnvironmentFailure, NameExistsError, SchedulerError
from slurmrl.name_resolve.store import NameStore
from slurmrl.run import events, keys
from slurmrl.run.events import EventWriter
from slurmrl.run.lease import GAPS_PER_TTL
from slurmrl.run.paths import RunPaths
from slurmrl.scheduler.base import Continue
from slurmrl.scheduler.chain import Link, continues
from slurmrl.scheduler.slurm import SlurmScheduler
from slurmrl.workers.link import FirstAgent, Left, Turn, read_intact_turn, reason_to_leave

logger = log.get(__name__)
LOOK_S = 15.0
LONGEST_WAIT_S = 300.0
"""Maximum wait for the lock before a job is requeued."""
ENDS_S = 60.0
"""Seconds that Slurm may take to end a requeued job."""


class LeaderLock:
    """Leader lock of a trial, for one job."""

    def __init__(
        self,
        paths: RunPaths,
        names: NameStore,
        link: Link,
        start: str,
        host: str,
        scheduler: SlurmScheduler,
        *,
        lease_ttl_s: float,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._paths, self._names, self._link = paths, names, link
        self._mine = Turn(start, link.element, host)
        self._scheduler = scheduler
        self._lease_ttl_s = lease_ttl_s
        self._sleep = sleep

    def take(self) -> Turn | None:
        """Take over the trial and return None, or return the holder's turn if its job still runs.

        Raises EnvironmentFailure if the directory does not answer.
        """
        number, holder = self._newest()
        while True:
            left = Left.UNKNOWN
            if holder is not None:
                if holder.start == self._mine.start:
                    return None  # an earlier attempt succeeded
                departure = self._left(holder)
                if departure is None:
                    return holder
                left = departure
            before = holder.start if holder is not None else ""
            mine = replace(self._mine, before=before, left=left)
            try:
                value = json.dumps(asdict(mine))
                self._names.add(keys.leader_lock(number + 1), value)
            except NameExistsError:
                number, holder = self._newest(number + 1)
                continue
            return None

    def _newest(self, number: int = 0) -> tuple[int, Turn | None]:
        """Return the newest number and its turn; ``number`` is known to be used (0: none is)."""
        self._names.refresh()
        for key in self._names.find_subtree(keys.leader_locks()):
            tail = key.rpartition("/")[2]
            number = max(number, int(tail) if tail.isdecimal() else 0)
        return number, read_intact_turn(self._names, number) if number else None

    def _left(self, holder: Turn) -> Left | None:
        """Return how a job has left the trial; None if it has not."""
        if holder.job == self._mine.job:
            return Left.PUT_BACK  # Slurm has started it again
        try:
            now = self._scheduler.row_of(holder.element)
        except SchedulerError as error:
            logger.info("cannot ask Slurm whether %s runs: %s", holder.element, error)
            return None if self._beats(holder) else Left.UNKNOWN
        if now is None:
            return Left.ENDED
        if now.restarts > holder.restarts or now.raw in ("PENDING", "NODE_FAIL", "PREEMPTED"):
            return Left.PUT_BACK
        if now.raw != "RUNNING":
            return Left.ENDED
        # A job with spares continues without its batch process after it has lost that host.
        return None if holder.host in now.hosts else Left.PUT_BACK

    def _beats(self, holder: Turn) -> bool:
        """Return whether a job's first agent renews its lease and no end of the job is recorded."""
        ends = events.read_ends(self._paths, f"supervisor.{self._link.group}.{holder.start}")
        if any(event["kind"] == "end" for event in ends):
            return False
        agent = FirstAgent(self._paths, self._names, self._lease_ttl_s)
        if agent.find(holder.start) is None:
            return False
        first = agent.observe()
        while (view := agent.observe()).alive:
            if view.counter != first.counter:
                return True
            self._sleep(self._lease_ttl_s / GAPS_PER_TTL / 2)
        return False


def wait_for_turn(
    lock: LeaderLock,
    link: Link,
    scheduler: SlurmScheduler,
    events: EventWriter,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Wait until this job holds the trial; return False if it should exit with 0 instead.

    A job that is not a link of the chain exits. A link is requeued after a wait that grows with
    each requeue; if Slurm refuses that, it waits for its turn.
    """
    waited_s, longest_s = 0.0, min(LOOK_S * link.restart, LONGEST_WAIT_S)
    reported = False
    while (holder := retry("take the trial over", lock.take)) is not None:
        if not reported:
            logger.warning("%s holds this trial, so this job does not run it", holder.element)
            events.write("surplus", job=link.element, holder=holder.element)
            reported = True
        if reason_to_leave(link.run, link.submission) is not None or not _in_chain(link, scheduler):
            return False
        if waited_s >= longest_s:
            if _put_back(link, holder, scheduler):
                sleep(ENDS_S)
                return False
            longest_s = float("inf")
        sleep(LOOK_S)
        waited_s += LOOK_S
    return True


def _in_chain(link: Link, scheduler: SlurmScheduler) -> bool:
    """Return whether the job belongs to one of the submission's arrays.

    A script submitted by hand does not. If neither Slurm nor the run directory can tell, return
    True.
    """
    try:
        return link.job in scheduler.recover(link.run, link.submission).get(link.group, (link.job,))
    except EnvironmentFailure as error:
        logger.info("cannot tell whether this job is a link: %s", error)
        return True


def _put_back(link: Link, holder: Turn, scheduler: SlurmScheduler) -> bool:
    """Requeue the job, which then stays queued until the running link of its array ends."""
    if continues(link) is Continue.NONE:
        return False
    try:
        scheduler.throttle(link.job, 1)
        scheduler.requeue(link.element)
    except SchedulerError as error:
        logger.warning("this job waits, because it cannot be requeued: %s", error)
        return False
    logger.warning("requeued: %s holds this trial", holder.element)
    return True
