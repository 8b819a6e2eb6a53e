"""Ended elements that the queue has forgotten, from the accounting database."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from slurmrl import log
from slurmrl.errors import SchedulerError
from slurmrl.scheduler import states
from slurmrl.scheduler.client import SlurmClient
from slurmrl.scheduler.rows import QueueRow

logger = log.get(__name__)


class MemoryRequest:
    """Query of ended elements that squeue no longer shows. sacct runs only while elements are
    missing, and not again after it failed or reported that there is no accounting."""

    def __init__(self, client: SlurmClient) -> None:
        self._client = client
        self._there = True
        self._known: dict[tuple[str, int], QueueRow] = {}
        self._asked: set[tuple[str, int]] = set()

    def complete(self, found: Sequence[QueueRow], jobs: Sequence[str]) -> list[QueueRow]:
        """Return the queue's rows and those of the elements that it no longer shows."""
        seen = {(row.job, element) for row in found for element in row.elements}
        lacking = [job for job in jobs if self._lacks(job, seen)]
        if lacking and self._there:
            self._ask(lacking)
            self._asked |= {(job, _lowest(job, seen)) for job in lacking}
        wanted = set(jobs)
        older = [row for key, row in self._known.items() if key not in seen and key[0] in wanted]
        return [*found, *older]

    def _lacks(self, job: str, seen: set[tuple[str, int]]) -> bool:
        """Return whether elements of a job are missing. A job without any row is always looked up:
        the database may have recorded it since."""
        lowest = _lowest(job, seen)
        return lowest != 0 and (lowest < 0 or (job, lowest) not in self._asked)

    def _ask(self, jobs: Sequence[str]) -> None:
        try:
            answer = self._client.accounting(jobs)
        except SchedulerError as error:
            logger.info("sacct is not called again: %s", error)
            answer = None
        self._there = answer is not None
        # The row of a cancelled array can name elements whose own rows say more.
        for row in sorted(answer or (), key=lambda row: len(row.elements), reverse=True):
            if not states.interpret(row.raw).state.active:  # what still runs is the queue's to say
                self._known |= {(row.job, element): _one(row, element) for element in row.elements}


def _lowest(job: str, seen: set[tuple[str, int]]) -> int:
    return min((element for name, element in seen if name == job), default=-1)


def _one(row: QueueRow, element: int) -> QueueRow:
    return replace(row, elements=(element,))
