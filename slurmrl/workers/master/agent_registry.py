"""The agents of an incarnation: those that said hello, and those that only claimed their task."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping

from slurmrl import keys, log
from slurmrl.backoff import Interval, retry
from slurmrl.errors import CorruptFileError, EnvironmentFailure, RunFailedError
from slurmrl.monitor import published
from slurmrl.name_resolve.base import NameStore
from slurmrl.plan.model import Plan
from slurmrl.workers.failure import Cause
from slurmrl.workers.messages import Message

logger = log.get(__name__)

HUNG_AGENT = "agent"
"""In a failure: the agent that hangs on the master's own host."""
TELL_TIMEOUT_S = 60.0
"""How long the directory may not answer when a host is to be reported."""


class AgentRegistry(Mapping[str, Message]):
    """What is known of each agent, by ``group/task``.

    ``heard`` grows as agents say hello. A host that dies before that leaves its claim in the name
    store; it is looked for every ``look_s`` while somebody is missing.
    """

    def __init__(
        self,
        names: NameStore,
        plan: Plan,
        heard: Mapping[str, Message],
        *,
        incarnation: int,
        job: str,
        look_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._names = names
        self._fixed = [group for group in plan.groups if not group.elastic]
        self._heard = heard
        self._incarnation = incarnation
        self._job = job
        self._looks = Interval(look_s, clock, after_s=look_s)
        self._claimed: dict[str, Message] = {}

    def __getitem__(self, label: str) -> Message:
        return self._heard[label] if label in self._heard else self._claimed[label]

    def __iter__(self) -> Iterator[str]:
        return iter({**self._claimed, **self._heard})

    def __len__(self) -> int:
        return len({**self._claimed, **self._heard})

    def look(self) -> None:
        """Look for the claims of those that have not said hello, if it is time to."""
        if not self._looks.due():
            return
        for group in self._fixed:
            missing = {task for task in range(group.hosts) if f"{group.name}/{task}" not in self}
            if missing:
                self._take_claims(group.name, missing)

    def _take_claims(self, group: str, tasks: set[int]) -> None:
        root = keys.group_attempts(group)
        try:
            claims = self._names.find_subtree(root)
            for task, attempt in _newest(claims, root).items():
                if task in tasks:
                    claim = published.attempt(self._names, group, task, attempt)
                    if claim.get("job") == self._job:
                        self._claimed[f"{group}/{task}"] = dict(claim)
        except (EnvironmentFailure, CorruptFileError) as error:
            logger.warning("cannot look for agents, trying on: %s", error)

    def report_lost(self, labels: list[str]) -> None:
        """Give the incarnation up for one of these agents. Its host is named in the name store,
        unless it is ours: we run there, so only the agent hangs. Raises RunFailedError."""
        ours = f"{self._fixed[0].name}/0" if self._fixed else ""
        watched = {f"{group.name}/{task}" for group in self._fixed for task in range(group.hosts)}
        for label in watched.intersection(labels) - {ours}:
            self._give_up(label, str(self[label]["host"]))
        if ours in labels:
            reason = f"the agent {ours} beats its lease no more, but its host lives: it hangs"
            raise RunFailedError(reason, {"cause": Cause.HUNG, "reason": reason, HUNG_AGENT: ours})

    def _give_up(self, label: str, host: str) -> None:
        said = json.dumps({"incarnation": self._incarnation, "job": self._job})
        retry(
            "report a lost host",
            lambda: self._names.add(keys.lost(host), said, replace=True, delete_on_exit=False),
            timeout_s=TELL_TIMEOUT_S,
        )
        reason = f"host {host} is lost: the lease of its agent {label} is not renewed any more"
        raise RunFailedError(reason, {"cause": Cause.LOST_HOST, "reason": reason, "host": host})


def _newest(claims: list[str], root: str) -> dict[int, int]:
    """Each task's last attempt."""
    found: dict[int, int] = {}
    for key in claims:
        task, _, attempt = key.removeprefix(f"{root}/").partition("/")
        if task.isdecimal() and attempt.isdecimal():
            found[int(task)] = max(found.get(int(task), -1), int(attempt))
    return found
