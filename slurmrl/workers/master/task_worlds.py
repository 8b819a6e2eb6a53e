"""The worlds of tasks of groups beside the trainers, which come and go during an incarnation.

The master reads what their agents report. None of it delays or ends the incarnation.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from slurmrl import log
from slurmrl.backoff import Interval
from slurmrl.channel.log import LogReader
from slurmrl.errors import CorruptFileError, EnvironmentFailure
from slurmrl.fsio import atomic
from slurmrl.monitor.events import EventWriter
from slurmrl.monitor.reports import Failure, Identity, Warned
from slurmrl.paths import RunPaths
from slurmrl.plan.model import Plan
from slurmrl.workers.messages import AGENT_LOG, FromAgent, Hello, Ready
from slurmrl.worlds import TRAINERS, group_of, world_of

logger = log.get(__name__)


@dataclass
class TaskAttempt:
    """One start of a task."""

    world: str
    number: int
    log: LogReader
    ready: set[int] = field(default_factory=set)
    """Its ranks that are ready."""
    ended: bool = False


class TaskWorlds:
    """Reads the agents' logs every ``look_s``."""

    def __init__(
        self,
        paths: RunPaths,
        plan: Plan,
        incarnation: int,
        events: EventWriter,
        *,
        look_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.agents: dict[str, Identity] = {}
        """The agent of the newest attempt at each task, by world, while that lives."""
        self._control = paths.control
        self._ranks = {
            group.name: group.world_size for group in plan.groups if group.name != TRAINERS
        }
        names = "|".join(map(re.escape, self._ranks))
        self._name = re.compile(rf"{incarnation:08d}\.({names})\.([0-9]{{1,9}})\.([0-9]{{1,9}})")
        self._events = events
        self._looks = Interval(look_s, clock)
        self._attempts: dict[str, TaskAttempt] = {}
        """By the name of the log."""

    def look(self, dead: Collection[str]) -> None:
        """When due, look for new attempts and read their logs. ``dead`` names the agents whose
        leases have expired."""
        if not self._ranks or not self._looks.due():
            return
        for attempt in self._living():
            if attempt.world in dead and self._is_newest(attempt):
                self._end(attempt, "its agent no longer renews its lease")
        try:
            names = atomic.list_names(self._control)
        except (EnvironmentFailure, FileNotFoundError) as error:
            logger.warning("cannot look for tasks of other groups, will retry: %s", error)
            return
        for match in filter(None, map(self._name.fullmatch, names)):
            if match[0] not in self._attempts:
                world, log_file = world_of(match[1], int(match[2])), self._control / match[0]
                self._attempts[match[0]] = TaskAttempt(world, int(match[3]), LogReader(log_file))
        newest: dict[str, int] = {}
        for attempt in self._attempts.values():
            newest[attempt.world] = max(attempt.number, newest.get(attempt.world, 0))
        for attempt in self._living():
            if attempt.number < newest[attempt.world]:
                self._end(attempt, "its task was started again")
            else:
                self._read(attempt)

    def _living(self) -> list[TaskAttempt]:
        return [attempt for attempt in self._attempts.values() if not attempt.ended]

    def _read(self, attempt: TaskAttempt) -> None:
        try:
            for message in map(AGENT_LOG.from_json, attempt.log.read()):
                self._take(attempt, message)
                if attempt.ended:
                    return
        except EnvironmentFailure as error:
            logger.warning("%s; will retry", error)
        except CorruptFileError as error:
            self._end(attempt, str(error))

    def _take(self, attempt: TaskAttempt, message: FromAgent) -> None:
        match message:
            case Hello():
                self.agents[attempt.world] = message.agent
            case Ready():
                attempt.ready.add(message.rank)
                if len(attempt.ready) == self._ranks[group_of(attempt.world)]:
                    logger.info("%s is ready", attempt.world)
                    self._events.write("world_ready", world=attempt.world)
            case Failure():
                self._end(attempt, message.reason)
            case Warned():
                self._end(attempt, f"its job will end ({message.cause})")

    def _is_newest(self, attempt: TaskAttempt) -> bool:
        known = self.agents.get(attempt.world)
        return known is not None and known.attempt == attempt.number

    def _end(self, attempt: TaskAttempt, reason: str) -> None:
        if self._is_newest(attempt):
            del self.agents[attempt.world]
        attempt.ended = True
        logger.warning("%s has ended, the trainers continue: %s", attempt.world, reason)
        self._events.write("world_ended", world=attempt.world, reason=reason)
