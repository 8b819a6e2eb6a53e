"""Rollout tasks that all fail at their start in the same way: more would only use up jobs."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from typing import Final

from slurmrl import log
from slurmrl.errors import CorruptFileError, EnvironmentFailure
from slurmrl.monitor import published, story
from slurmrl.monitor.reports import Cause, Failure
from slurmrl.name_resolve.file import FileNameStore
from slurmrl.paths import RunPaths
from slurmrl.plan.placement import ROLLOUTS
from slurmrl.workers.failure import failed
from slurmrl.workers.master.task_attempts import RolloutAttempt

logger = log.get(__name__)

STARTS: Final = 2
"""Failures in the same way for each task that may run, after which the trial gives up."""
FEWEST: Final = 3
OF_ONE_HOST: Final = 4
"""How many times as many it takes if all were on one host, which may be what is wrong."""
_NUMBER = re.compile(r"\d+")


class FailedTasks:
    """Failures of attempts that never held weights, since any attempt last did."""

    def __init__(self, paths: RunPaths, *, inside: bool) -> None:
        """``inside``: whether the tasks are in the trainers' job, where each of them is started
        again on its own GPUs. Earlier failures do not count."""
        self._names = FileNameStore(paths.names)
        self._inside = inside
        self._failures: dict[tuple[int, int], Failure] = {}
        """By task and attempt."""
        self._known: set[tuple[int, int]] | None = None

    def look(
        self, attempts: Collection[RolloutAttempt], lives: Callable[[RolloutAttempt], bool]
    ) -> None:
        """Read new failures. They begin to count again once an attempt that ``lives`` holds
        weights."""
        worked = {(one.task, one.number) for one in attempts if one.record.version}
        try:
            self._read_new(worked)
        except (EnvironmentFailure, CorruptFileError) as error:
            logger.warning("cannot look for failures of rollout tasks, will retry: %s", error)
        if any(one.record.version for one in attempts if not one.over and lives(one)):
            self._failures.clear()

    def _read_new(self, worked: Collection[tuple[int, int]]) -> None:
        found = set(published.failed_attempts(self._names, ROLLOUTS))
        if self._known is None:
            self._known = found
        for task, number in sorted(found - self._known):
            failure = published.attempt_failure(self._names, ROLLOUTS, task, number)
            self._known.add((task, number))
            if failure is not None and (task, number) not in worked:
                self._failures[task, number] = failure

    def judge(
        self,
        living: Iterable[RolloutAttempt],
        lives: Callable[[RolloutAttempt], bool],
        allowed: int,
    ) -> None:
        """Raise RunFailedError if nothing but such failures is to be expected of the ``allowed``
        tasks that may run at a time: there are enough of them, and each attempt that still starts
        is on a host, or at a task of the trainers' job, where one has failed."""
        alike: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for place, failure in self._failures.items():
            alike[_NUMBER.sub("", story.attempt_failure_words(failure))].append(place)
        places = max(alike.values(), key=len, default=[])
        hosts = {self._failures[place].host for place in places}
        enough = max(STARTS * allowed, FEWEST)
        if not self._inside and len(hosts) == 1:
            enough *= OF_ONE_HOST
        if not allowed or len(places) < enough:
            return
        if any(self._may_work(one) for one in living if lives(one)):
            return
        last = self._failures[places[-1]]
        where = f"{ROLLOUTS}/{places[-1][0]}" + (f" on {last.host}" if last.host else "")
        reason = (
            f"{len(places)} rollout tasks failed in the same way at their start, and none works; "
            f"the last one ({where}): {story.attempt_failure_words(last)}"
        )
        raise failed(Failure(cause=Cause.ENVIRONMENT, reason=reason, host="", final=True))

    def _may_work(self, attempt: RolloutAttempt) -> bool:
        """Whether an attempt that has not failed is another case than those that have."""
        if self._inside:
            return all(task != attempt.task for task, _ in self._failures)
        try:
            claim = published.attempt(self._names, ROLLOUTS, attempt.task, attempt.number)
        except (EnvironmentFailure, CorruptFileError):
            return True
        return claim is None or claim.host not in {one.host for one in self._failures.values()}
