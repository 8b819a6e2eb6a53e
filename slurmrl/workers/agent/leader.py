"""Detection of the loss of a job's first host, on which the master and the batch process run.

The remaining agents of a round see it first, end the incarnation and requeue the job
(`workers.requeue`).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from slurmrl import log
from slurmrl.backoff import Interval
from slurmrl.errors import CorruptFileError, EnvironmentFailure
from slurmrl.name_resolve.base import NameStore
from slurmrl.run.lease import GAPS_PER_TTL, LeaseObserver
from slurmrl.run.paths import RunPaths
from slurmrl.run.reports import Cause, Failure, Identity
from slurmrl.scheduler.client import usable_hosts
from slurmrl.scheduler.succession import Link
from slurmrl.watch import published
from slurmrl.workers.failure import failed
from slurmrl.workers.requeue import requeue

logger = log.get(__name__)

WATCHERS = 3
"""This many agents watch the first one, however many there are."""
GRACE_S = 30.0
"""How long a batch process that still runs may take to end this step."""
LOOK_S = 3.0


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
            claim = published.first_agent(self._names, self._identity.job)
        except (CorruptFileError, EnvironmentFailure) as error:
            logger.info("cannot look for the first agent, will retry: %s", error)
            return None
        if claim is None:
            return None
        self._host = claim.host
        lease = self._paths.lease(claim.group, claim.task, claim.attempt)
        return LeaseObserver(lease, self._ttl_s, self._clock)


def leave_without(
    host: str,
    paths: RunPaths,
    submission: int,
    identity: Identity,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Requeue the job in place of its batch process, which was lost with ``host``. If the batch
    process is alive after all, it ends this process within the grace."""
    waited_s = 0.0
    while waited_s < GRACE_S and usable_hosts([host], ()):
        sleep(LOOK_S)
        waited_s += LOOK_S
    requeue(Link.here(paths, submission, identity.group), sleep)
