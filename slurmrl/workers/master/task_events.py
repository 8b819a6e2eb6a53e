"""What a master tells about the attempts of rollout tasks in its events."""

from __future__ import annotations

from typing import Final

from slurmrl import log
from slurmrl.data.ledger import ItemSample
from slurmrl.errors import CorruptFileError, EnvironmentFailure
from slurmrl.history.lineage import Lineage
from slurmrl.monitor import events
from slurmrl.monitor.events import EventWriter
from slurmrl.paths import RunPaths
from slurmrl.workers.master.task_attempts import RolloutAttempt, parse_name

logger = log.get(__name__)

STATE: Final = "rollout_task"
"""The kind of an attempt's states."""
JOINED: Final = "joined"
LEFT: Final = "left"
LOST: Final = "lost"


class TaskEvents:
    """Tells a state of an attempt once: a master that resumes from a commit reads again what
    attempts have said since, which earlier masters have told."""

    def __init__(
        self, paths: RunPaths, writer: EventWriter, lineage: Lineage, incarnation: int
    ) -> None:
        """``incarnation`` is this master's, the newest of ``lineage``."""
        self._writer = writer
        base = max(lineage.last_steps.keys() - {incarnation}, default=1)
        self._told = {
            tuple(str(event.get(name)) for name in ("task", "attempt", "state"))
            for earlier in range(base, incarnation)
            for event in _states(paths, earlier)
        }

    def joined(self, attempt: RolloutAttempt, host: str) -> None:
        self._tell(attempt, JOINED, host=host)

    def ended(self, attempt: RolloutAttempt, state: str, reason: str, items: int) -> None:
        """``items``: how many it had are queued again."""
        self._tell(attempt, state, reason=reason, items=items)

    def silent(self, attempt: RolloutAttempt, items: int) -> None:
        """Its ``items`` go to others, because it says nothing."""
        logger.warning("%s says nothing, %d items are queued again", attempt.name, items)
        said = {"silent_s": attempt.silent_s, "items": items}
        self._writer.write("task_silent", **attempt.who, **said)

    def unreadable(self, attempt: RolloutAttempt, version: str, reason: str) -> None:
        """It cannot read a version of the weights."""
        logger.warning("%s cannot read weight version %s", attempt.name, version)
        what = {"version": version, "reason": reason}
        self._writer.write("weights_unreadable", **attempt.who, **what)

    def damaged(self, sample: ItemSample, reason: str) -> None:
        """The item of a damaged sample is made again."""
        group, task, attempt = parse_name(sample.task)
        logger.warning("item %d is made again: %s", sample.item, reason)
        self._writer.write(
            "samples_damaged",
            task=f"{group}/{task}",
            attempt=attempt,
            item=sample.item,
            file=sample.file,
            reason=reason,
        )

    def _tell(self, attempt: RolloutAttempt, state: str, **more: object) -> None:
        told = attempt.label, str(attempt.number), state
        if told not in self._told:
            self._told.add(told)
            self._writer.write(STATE, state=state, **attempt.who, **more)


def _states(paths: RunPaths, incarnation: int) -> list[events.Event]:
    """Return what the master of an incarnation has told; nothing if that cannot be read."""
    try:
        return events.read_kind(paths, f"master.{incarnation}", STATE)
    except (CorruptFileError, EnvironmentFailure) as error:
        logger.warning("states of rollout tasks may be told again: %s", error)
        return []
