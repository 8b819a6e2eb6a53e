"""Detection of the loss of a job's first host, on which the master and the batch process run.

Slurm ends a job whose batch host is lost, but not a job with spares (``--no-kill``): that one would
keep its hosts, without a batch process and without work.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from slurmrl import log
from slurmrl.backoff import Backoff, Interval
from slurmrl.errors import (
    CorruptFileError,
    EnvironmentFailure,
    SchedulerError,
    SlurmrlError,
)
from slurmrl.lease import GAPS_PER_TTL, LeaseObserver
from slurmrl.monitor import published
from slurmrl.monitor.reports import Cause, Failure, Identity
from slurmrl.name_resolve.base import NameStore
from slurmrl.paths import RunPaths
from slurmrl.scheduler.base import Continue
from slurmrl.scheduler.chain import continues
from slurmrl.scheduler.client import SlurmClient, may_have_worked, usable_hosts
from slurmrl.scheduler.succession import TIMEOUT_S, Link
from slurmrl.workers.failure import failed
from slurmrl.worlds import TRAINERS

logger = log.get(__name__)

WATCHERS = 3
"""This many agents watch the first one, however many there are."""
GRACE_S = 30.0
"""How long a batch process that still runs may take to end this step."""
LOOK_S = 3.0
ASK_S = (2.0, 60.0)
"""First and longest pause between attempts to end the job."""
ASKED = 30
"""This many attempts: more than 20 minutes."""


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
        self._paths, self._names, self._identity = paths, names, identity
        self._ttl_s, self._clock = ttl_s, clock
        look_s = ttl_s / GAPS_PER_TTL / 2
        self._looks = Interval(look_s, clock, after_s=look_s)
        self._lease: LeaseObserver | None = None
        self._host = ""

    def look(self) -> None:
        """Read the lease when due. Raises RunFailedError if the first agent's host is lost."""
        watches = self._identity.trains and 0 < self._identity.task <= WATCHERS
        if not watches or not self._looks.due():
            return
        lease = self._lease = self._lease or self._find()
        if lease is None or lease.observe().alive:
            return
        reason = f"host {self._host} and the master on it are lost: its agent's lease expired"
        raise failed(Failure(cause=Cause.LOST_HOST, reason=reason, host=self._host))

    def _find(self) -> LeaseObserver | None:
        """Return the lease of the first agent of our round, or None before that one has started."""
        try:
            claim = find_first_agent(self._names, self._identity.job)
        except (CorruptFileError, EnvironmentFailure) as error:
            logger.info("cannot look for the first agent, will retry: %s", error)
            return None
        if claim is None:
            return None
        self._host = claim.host
        lease = self._paths.lease(claim.group, claim.task, claim.attempt)
        return LeaseObserver(lease, self._ttl_s, self._clock)


def find_first_agent(names: NameStore, job: str) -> Identity | None:
    """Return the first agent of the trainers in a round, or None before it has started. Raises
    CorruptFileError, EnvironmentFailure."""
    for number in published.attempt_numbers(names, TRAINERS, 0):
        claim = published.attempt(names, TRAINERS, 0, number)
        if claim is not None and claim.job == job:
            return claim
    return None


def leave_without(
    host: str,
    paths: RunPaths,
    submission: int,
    identity: Identity,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Requeue the job in place of its batch process, which was lost with ``host``. If the batch
    process is alive after all, it ends this process within the grace.

    Nobody else would end the job before its time limit, so a controller that does not answer is
    asked again, and a job that Slurm refuses to requeue is cancelled."""
    client = SlurmClient(TIMEOUT_S)
    waited_s = 0.0
    while waited_s < GRACE_S and usable_hosts([host], ()):
        sleep(LOOK_S)
        waited_s += LOOK_S
    link = Link.here(paths, submission, identity.group)
    leave = client.requeue if _is_requeued(link) else _cancel(client)
    backoff = Backoff(*ASK_S, sleep=sleep)
    for number in range(ASKED):
        try:
            if number and not _holds_hosts(client, link):
                return
            leave(link.element)
            return
        except SchedulerError as error:
            logger.warning("cannot end the job: %s", error)
            if not may_have_worked(error):
                leave = _cancel(client)
        backoff.sleep()


def _is_requeued(link: Link) -> bool:
    try:
        return continues(link) is not Continue.NONE
    except SlurmrlError as error:
        logger.warning("cannot read how the trial continues: %s", error)
        return True


def _cancel(client: SlurmClient) -> Callable[[str], None]:
    return lambda element: client.cancel([element])


def _holds_hosts(client: SlurmClient, link: Link) -> bool:
    """Return whether the job runs and has not been requeued since this process started."""
    rows = [row for row in client.queue([link.job]) if link.index in row.elements]
    return any(row.raw == "RUNNING" and row.restarts == link.restart for row in rows)
