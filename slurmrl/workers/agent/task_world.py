"""The world of one task of a group beside the trainers, in an incarnation of the trainers.

It takes part in whichever incarnation is newest and ends with it, but not the other way round: its
failure is reported to the master and ends the task, never an incarnation.
"""

from __future__ import annotations

import socket

from slurmrl.errors import SlurmrlError, StaleIncarnationError
from slurmrl.fsio import objects
from slurmrl.monitor.reports import Failure
from slurmrl.workers import address
from slurmrl.workers.agent.incarnation import Incarnation
from slurmrl.workers.messages import CollectStacks, Exit, Order


class TaskWorld(Incarnation):
    def _meet(self, listener: socket.socket | None) -> str:
        """All ranks of this world are on this host."""
        assert listener is not None
        return address.name_of(listener)

    def _passes_on(self, order: Order) -> bool:
        """The trainers' work is not for this world; the end of the trial is."""
        return isinstance(order, Exit)

    def _answer(self, request: CollectStacks) -> None:
        """Requests for stacks are about the trainers' ranks."""

    def _send_stacks(self, why: str) -> None:
        """Stacks explain why the trainers hang."""

    def _send_warning(self) -> None:
        """Leave when the job is about to end: the trainers have another job."""
        if (warned := self.host.warnings.take()) is not None:
            self.send(warned)
            self.host.events.write("warned", **objects.to_json(warned))
        if self.host.warnings.received:
            raise StaleIncarnationError("this job will end soon")

    def fail(self, error: SlurmrlError) -> Failure:
        """Report a failure of this world to the master, which continues without it."""
        failure = self.host.describe(error)
        self.host.write_failure(self.number, failure)
        self._send_failure(failure)
        return failure
