"""How many rollout tasks a trial needs to begin, and how many may run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from slurmrl import log
from slurmrl.errors import CorruptFileError, EnvironmentFailure
from slurmrl.fsio.shapes import MOST_COUNT
from slurmrl.paths import RunPaths
from slurmrl.plan.placement import ROLLOUTS
from slurmrl.scheduler import scale
from slurmrl.workers.master.task_attempts import RolloutAttempt

logger = log.get(__name__)


class TaskNumbers:
    """Judges the tasks that have joined."""

    def __init__(
        self,
        paths: RunPaths,
        *,
        planned: int = MOST_COUNT,
        fixed: bool = False,
        least: int = 1,
        patience_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``planned`` tasks may run at a time, or as many as a user has set unless their number is
        ``fixed``: they are in the trainers' job. An incarnation needs ``least`` to begin. Tasks are
        too many after ``patience_s``, in which lost ones would be known."""
        self.allowed = planned
        """Tasks that may run now."""
        self.least = least
        self._paths = paths
        self.fixed = fixed
        self._planned = planned
        self._patience_s = patience_s
        self._clock = clock
        self._too_many_since: float | None = None
        self._were_enough = False

    def look(self) -> None:
        """Read the number that a user may have set, perhaps while the tasks were an array."""
        if self.fixed:
            return
        try:
            self.allowed = scale.wanted(self._paths, ROLLOUTS, self._planned)
        except (EnvironmentFailure, CorruptFileError) as error:
            logger.warning("the number of tasks is unchanged: %s", error)

    def are_enough(self, joined: int) -> bool:
        """Return whether the least number has joined since the incarnation began."""
        self._were_enough = self._were_enough or joined >= self.least
        return self._were_enough

    def surplus(self, joined: Iterable[RolloutAttempt]) -> Sequence[RolloutAttempt]:
        """Return the newest ones if there have been too many for long enough. Elements of an array
        start in the order of their numbers."""
        staying = sorted(
            (one for one in joined if not one.leaving), key=lambda one: (one.task, one.number)
        )
        if len(staying) <= self.allowed:
            self._too_many_since = None
            return ()
        if self._too_many_since is None:
            self._too_many_since = self._clock()
        waited_s = self._clock() - self._too_many_since
        return staying[self.allowed :] if waited_s >= self._patience_s else ()
