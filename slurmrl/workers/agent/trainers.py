"""Whether the trainers still live, as a rollout task sees it."""

from __future__ import annotations

import time
from collections.abc import Callable

from slurmrl import log
from slurmrl.backoff import Interval
from slurmrl.errors import CorruptFileError, EnvironmentFailure
from slurmrl.name_resolve.base import NameStore
from slurmrl.run.lease import GAPS_PER_TTL, LeaseObserver, LeaseView
from slurmrl.run.orphaned import Orphaned
from slurmrl.run.paths import RunPaths
from slurmrl.run.worlds import TRAINERS
from slurmrl.watch import published

logger = log.get(__name__)


class TrainersLease:
    """Observes the lease of the first agent of the newest incarnation, with this host's clock."""

    def __init__(
        self,
        paths: RunPaths,
        names: NameStore,
        ttl_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._paths, self._names = paths, names
        self._ttl_s, self._clock = ttl_s, clock
        self._looks = Interval(ttl_s / GAPS_PER_TTL / 2, clock)
        self._attempt = 0
        """That of the first agent; until an incarnation has begun, the first one of all."""
        self._lease = self._observer()
        self._view = LeaseView(alive=True, age_s=0.0, counter=None)
        self._sought: str | None = None
        """The round whose first agent is not known yet."""

    def follow(self, job: str) -> None:
        """From now on observe the first agent of this round, which began the newest incarnation."""
        self._sought = job

    def seen(self, incarnation: int) -> Orphaned:
        """Return what is known of them: the last heartbeat of ``incarnation``, the newest one."""
        counter = self._view.counter
        return Orphaned(incarnation=incarnation, attempt=self._attempt, counter=counter)

    def beat_since(self, seen: Orphaned) -> bool:
        """Return whether there was a heartbeat since another task has seen the last one, or may
        have been: the directory does not answer."""
        lease = self._paths.lease(TRAINERS, 0, seen.attempt)
        return LeaseObserver(lease, self._ttl_s, self._clock).observe().counter != seen.counter

    def gone_s(self) -> float:
        """Look when due. Return for how long the lease was not renewed; 0 while it is valid. Time
        during which the directory did not answer does not count."""
        if self._looks.due():
            self._seek()
            self._view = self._lease.observe()
        return 0.0 if self._view.alive else self._view.age_s

    def _seek(self) -> None:
        if self._sought is None:
            return
        try:
            claim = published.first_agent(self._names, self._sought)
        except (CorruptFileError, EnvironmentFailure) as error:
            logger.info("cannot look for the trainers' first agent, will retry: %s", error)
            return
        self._sought = None
        if claim is not None and claim.attempt != self._attempt:
            self._attempt = claim.attempt
            self._lease = self._observer()

    def _observer(self) -> LeaseObserver:
        lease = self._paths.lease(TRAINERS, 0, self._attempt)
        return LeaseObserver(lease, self._ttl_s, self._clock)
