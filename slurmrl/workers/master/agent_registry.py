"""Registry of an incarnation's agents: those that said hello and those that only claimed a task."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

from slurmrl import keys, log
from slurmrl.backoff import Interval
from slurmrl.errors import CorruptFileError, EnvironmentFailure
from slurmrl.monitor import published
from slurmrl.monitor.reports import Cause, Failure, Identity
from slurmrl.name_resolve.base import NameStore
from slurmrl.plan.model import Plan
from slurmrl.workers.failure import failed, publish_loss
from slurmrl.worlds import TRAINERS

logger = log.get(__name__)


class AgentRegistry(Mapping[str, Identity]):
    """The known agents by ``group/task``.

    ``heard`` grows as agents say hello. The claims of hosts that die before that are in the name
    store, which is read every ``look_s`` while agents are missing.
    """

    def __init__(
        self,
        names: NameStore,
        plan: Plan,
        heard: Mapping[str, Identity],
        *,
        incarnation: int,
        job: str,
        look_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._names = names
        self._hosts = plan.trainers.hosts
        self._heard = heard
        self._incarnation = incarnation
        self._job = job
        self._looks = Interval(look_s, clock, after_s=look_s)
        self._claimed: dict[str, Identity] = {}

    def __getitem__(self, label: str) -> Identity:
        return self._heard[label] if label in self._heard else self._claimed[label]

    def __iter__(self) -> Iterator[str]:
        return iter({**self._claimed, **self._heard})

    def __len__(self) -> int:
        return len({**self._claimed, **self._heard})

    def look(self) -> None:
        """When due, look for claims of agents that have not said hello."""
        if not self._looks.due():
            return
        missing = {task for task in range(self._hosts) if f"{TRAINERS}/{task}" not in self}
        if missing:
            self._take_claims(missing)

    def _take_claims(self, tasks: set[int]) -> None:
        root = keys.group_attempts(TRAINERS)
        try:
            claims = self._names.find_subtree(root)
            for task, attempt in _newest(claims, root).items():
                if task in tasks:
                    claim = published.attempt(self._names, TRAINERS, task, attempt)
                    if claim is not None and claim.job == self._job:
                        self._claimed[claim.label] = claim
        except (EnvironmentFailure, CorruptFileError) as error:
            logger.warning("cannot look for agents, will retry: %s", error)

    def report_lost(self, labels: list[str]) -> None:
        """End the incarnation because of one of these agents, if it is one of the trainers'. Its
        host is recorded as lost in the name store, unless it is the master's own, where only the
        agent can hang. Raises RunFailedError."""
        ours = f"{TRAINERS}/0"
        watched = {f"{TRAINERS}/{task}" for task in range(self._hosts)}
        for label in watched.intersection(labels) - {ours}:
            self._give_up(label, self[label].host)
        if ours in labels:
            reason = f"the agent {ours} hangs: it no longer renews its lease, but its host is alive"
            raise failed(Failure(cause=Cause.HUNG, reason=reason, agent=ours))

    def _give_up(self, label: str, host: str) -> None:
        publish_loss(self._names, host, self._incarnation, self._job)
        reason = f"host {host} is lost: its agent {label} no longer renews its lease"
        raise failed(Failure(cause=Cause.LOST_HOST, reason=reason, host=host))


def _newest(claims: list[str], root: str) -> dict[int, int]:
    """Return the newest attempt of each task."""
    newest: dict[int, int] = {}
    for key in claims:
        task, _, attempt = key.removeprefix(f"{root}/").partition("/")
        if task.isdecimal() and attempt.isdecimal():
            newest[int(task)] = max(newest.get(int(task), -1), int(attempt))
    return newest
