"""The current activity of a rank, for the diagnosis of hangs.

The working thread updates it; the thread of the pulse reads and sends it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

IDLE = ""
"""The call of a rank that waits for the master's next message."""


class Awaited(NamedTuple):
    what: str
    rank: int
    """The rank that sends it."""
    since: float
    """By the clock of `Activity`."""


class Doing(NamedTuple):
    call: str
    """A call of the dataflow graph, ``load``, ``save`` or ``start``; `IDLE` between two."""
    step: int | None
    since: float
    """Start of the call, by the clock of `Activity`."""
    phase: str = ""
    part: int = 0
    """Micro-batch, from 1; 0 outside of them."""
    parts: int = 0
    awaited: Awaited | None = None


class Activity:
    """The activity of one rank. Updates replace it as a whole, so readers never see half of one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._doing = Doing("start", None, clock())

    def begin(self, call: str, step: int | None = None) -> None:
        self._doing = Doing(call, step, self._clock())

    def end(self) -> None:
        self._doing = Doing(IDLE, None, self._clock())

    def phase(self, name: str, part: int = 0, parts: int = 0) -> None:
        """Set the phase of the current call, and its micro-batch ``part`` of ``parts`` if any."""
        self._doing = self._doing._replace(phase=name, part=part, parts=parts, awaited=None)

    @contextmanager
    def aside(self, name: str) -> Iterator[None]:
        """Set another phase of the current call, and restore the one before at the end."""
        before = self._doing
        self.phase(name)
        try:
            yield
        finally:
            self._doing = before

    def await_from(self, rank: int, what: str) -> None:
        """Set what the current call waits for, until its next phase."""
        self._doing = self._doing._replace(awaited=Awaited(what, rank, self._clock()))

    def current(self) -> tuple[Doing, float]:
        """Return the activity and the age of its call in seconds."""
        doing = self._doing
        return doing, self.age(doing.since)

    def age(self, since: float) -> float:
        """Return the seconds since a time of this clock."""
        return self._clock() - since
